"""The stages of a decode step for every batch size, in one memory, lent to one layer at a time."""

from __future__ import annotations

import copy

import torch

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.decode import Stages, stages_class
from locks_kernels.shapes import DecodeShape, SelectOptions, ShapeError


class Workspaces:
    """Stages keep nothing from one call to the next, so that all layers and all batch sizes can share what they write to.

    No cache is kept here: an engine allocates one to measure itself with and then drops it.
    """

    def __init__(self, stages: type[Stages], options: SelectOptions) -> None:
        self._stages, self.options = stages, options
        self._bases: dict[tuple[int, ...], Stages] = {}
        self._memory: dict[str, torch.Tensor] = {}

    def on(self, cache: PagedCache, sequences: Sequences) -> Stages:
        """Stages for one layer's cache.  The first call for a batch size allocates and compiles: not for capture."""
        key = tuple(sequences.block_table.shape)
        if key not in self._bases:
            self._bases[key] = self._make(cache, sequences)
        return lend(self._bases[key], cache, sequences)

    def finalise(self, cache: PagedCache, slots: torch.Tensor) -> None:
        """Summarise the pages whose last slot is among `slots` (Stages.finalise_slots)."""
        if not self._bases:
            nothing = torch.zeros(1, 1, dtype=torch.int32, device=cache.keys.device)
            self.on(cache, Sequences(nothing, nothing[0]))
        lend(next(iter(self._bases.values())), cache, None).finalise_slots(slots)

    def _make(self, cache: PagedCache, sequences: Sequences) -> Stages:
        stages = self._stages(cache, sequences, self.options, None)
        for name, tensor in vars(stages).items():
            if isinstance(tensor, torch.Tensor):
                memory = self._memory.get(name)
                if memory is None or memory.numel() < tensor.numel():
                    self._memory[name] = tensor.flatten()
                else:
                    setattr(stages, name, memory[: tensor.numel()].view(tensor.shape))
        return lend(stages, None, None)


def lend(stages: Stages, cache: PagedCache | None, sequences: Sequences | None) -> Stages:
    """The same stages for another cache or other sequences of the same shapes."""
    lent = copy.copy(stages)
    lent.cache, lent.sequences = cache, sequences  # type: ignore[attr-defined]
    return lent


def choose(kernels: str, shape: DecodeShape, device: torch.device, batch: int, max_pages: int) -> tuple[str, type[Stages]]:
    """Name and class of the stages for batches of up to `batch`; ShapeError with the reasons where none can run in a graph."""
    cache = PagedCache.allocate(shape, 1, device)
    one = torch.zeros(1, 1, dtype=torch.int32, device=device)
    sequences = Sequences(one.expand(batch, max_pages), one[0].expand(batch))
    reasons = []
    for name in ("cuda", "triton") if kernels == "auto" else (kernels,):
        try:
            return stages_class(name, cache, sequences)
        except ShapeError as error:
            reasons.append(str(error))
    raise ShapeError("; ".join(reasons))
