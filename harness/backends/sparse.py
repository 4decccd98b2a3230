"""What the timed selectors share: a step that appends a token, chooses pages and attends them, and how its output is judged."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.backend import Backend
from harness.environment import version
from harness.verify_selection import checked_sequences
from harness.workload import Workload
from locks_kernels import reference
from locks_kernels.decode import Step, step_launches

STARTS_EARLY = True  # ahead of a step is that of another layer, or a projection


class SparseStep(Backend):
    """`_steps` and `_outputs` have one entry a copy, added by `prepare`."""

    writes_cache = True

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._outputs: list[torch.Tensor] = []

    def version(self) -> str | None:
        return version("locks-bench")

    def _add(self, workload: Workload, copy: int, step: Step) -> torch.Tensor:
        """Keep a copy's stages; returns where its output goes."""
        self._steps.append(step)
        self._outputs.append(torch.empty_like(workload.queries[copy]))
        return self._outputs[copy]

    def expected(self, workload: Workload, copy: int) -> torch.Tensor:
        """Exact attention over the pages that the step itself kept; whether they are the right ones is `check`."""
        rows = workload.checked
        query = workload.queries[copy][rows].float()
        return reference.attend(query, workload.caches[copy], checked_sequences(workload), self._steps[copy].tables[rows])[0]

    def stages(self, workload: Workload, copy: int) -> dict[str, Callable[[], object]]:
        token = workload.queries[copy], workload.new_keys[copy], workload.new_values[copy]
        return step_launches(self._steps[copy], *token, self._outputs[copy], STARTS_EARLY)
