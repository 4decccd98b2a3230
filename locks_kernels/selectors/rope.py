"""Rotary positions as data, so that a method can take them off the keys and put them on again."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Rope:
    """cos, sin: fp32 [N, width], width <= D channels are rotated.  interleaved: pairs are neighbours, not halves apart."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def apply(self, keys: torch.Tensor) -> torch.Tensor:
        """keys [..., N, D] of positions 0 to N - 1 with their rotation."""
        return self._rotate(keys, self.cos[: keys.shape[-2]], self.sin[: keys.shape[-2]])

    def remove(self, keys: torch.Tensor) -> torch.Tensor:
        """The inverse of `apply`; a factor that the model multiplies into cos and sin comes off too."""
        cos, sin = self.cos[: keys.shape[-2]], self.sin[: keys.shape[-2]]
        size = cos.square() + sin.square()
        return self._rotate(keys, cos / size, -sin / size)

    def _rotate(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        turned, rest = keys[..., :width], keys[..., width:]
        if self.interleaved:
            across = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
        else:
            across = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
        return torch.cat((turned * cos + across * sin, rest), -1)
