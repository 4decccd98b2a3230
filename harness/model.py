"""One decode step of a dense transformer around somebody else's attention: the whole of level `token`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from harness.weights import Weights

if TYPE_CHECKING:
    from harness.backend import Launch
    from locks_kernels.cache import Sequences
    from locks_kernels.layer_ops import NewToken


@dataclass(frozen=True)
class AttentionSite:
    """One layer's attention: where it takes its inputs from, and the launch that computes its output [B, HQ, D]."""

    token: NewToken
    attend: Launch


class TokenStep:
    """Embedding, all layers, LM head and greedy choice; called, it launches one step and returns `logits`.

    tokens       int64 [B]   input, read on the device.  A step does not change it, so that two launches, or a launch and
                             a replay, can be compared; copy `next_tokens` here to go on decoding
    next_tokens  int64 [B]   argmax of the logits
    logits       [B, V]
    Rotary positions are seq_lens - 1, read on the device.  `ops` is `layer_ops` or `layer_triton`.
    """

    def __init__(self, weights: Weights, sites: Sequence[AttentionSite], sequences: Sequences, ops: ModuleType) -> None:
        """`sites`: one per layer, or fewer; layer i then uses site i modulo their number."""
        self.weights, self.sites, self.sequences, self.ops = weights, sites, sequences, ops
        geometry, batch, head = weights.geometry, sequences.batch, weights.head
        self.logits = head.new_empty(batch, geometry.vocabulary)
        self.tokens = torch.arange(1, batch + 1, device=head.device) % geometry.vocabulary
        self.next_tokens = torch.empty_like(self.tokens)
        self._hidden = head.new_empty(batch, geometry.model.hidden)
        self._mlp = head.new_empty(batch, geometry.mlp)
        self._rope = head.new_empty(batch, geometry.model.head_dim, dtype=torch.float32)

    def __call__(self) -> torch.Tensor:
        ops, hidden, weights = self.ops, self._hidden, self.weights
        torch.index_select(weights.embedding, 0, self.tokens, out=hidden)
        ops.rope_table(self.sequences.seq_lens, self._rope)
        for index, layer in enumerate(weights.layers):
            site = self.sites[index % len(self.sites)]
            ops.norm_qkv(hidden, layer.attention_gain, layer.qkv, layer.qkv_bias, self._rope, layer.head_gains, site.token)
            ops.linear_add(site.attend().flatten(1).contiguous(), layer.output, hidden)
            ops.norm_gate_up(hidden, layer.mlp_gain, layer.gate_up, self._mlp)
            ops.linear_add(self._mlp, layer.down, hidden)
        ops.norm_linear(hidden, weights.final_gain, weights.head, self.logits)
        torch.argmax(self.logits, -1, out=self.next_tokens)
        return self.logits
