"""Level `token`: from a case and a backend's attention launches to one launch that decodes a token per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from harness.level import LevelLaunch
from harness.model import AttentionSite, TokenStep
from harness.weights import RankGeometry, Weights, random_weights, weight_bytes
from locks_kernels import layer_ops
from locks_kernels.cache import TORCH_DTYPE
from locks_kernels.layer_ops import NewToken

if TYPE_CHECKING:
    from harness.backend import Backend, Launch
    from harness.case import Case
    from harness.workload import Workload


_held: dict[tuple[RankGeometry, str, torch.device, int], Weights] = {}


def shared_weights(geometry: RankGeometry, dtype: str, device: torch.device, seed: int) -> Weights:
    """The weights of the case at hand, built once for all its backends; those of the case before are given up first."""
    key = (geometry, dtype, device, seed)
    if key not in _held:
        release_weights()
        _held[key] = random_weights(geometry, TORCH_DTYPE[dtype], device, seed)
    return _held[key]


def release_weights() -> None:
    """Give up the weights of the last case, so that their memory can serve another."""
    _held.clear()


def token_launch(case: Case, workload: Workload, backend: Backend, launches: Sequence[Launch]) -> LevelLaunch:
    """One decode step of `case.model` with `launches[copy]` as the attention of layers copy, copy + copies, ...

    The rank's share of the model follows from the heads of the workload.  A backend that `writes_cache` appends the new
    token by itself; for the others the kernel that rotates the new key does.
    """
    queries = workload.queries[0]
    tensor_parallel = case.model.query_heads // queries.shape[1]
    geometry = RankGeometry(case.model, tensor_parallel)
    weights = shared_weights(geometry, case.dtype, queries.device, case.seed)
    sites = []
    for copy, attend in enumerate(launches):
        append = None if backend.writes_cache else (workload.caches[copy], workload.sequences)
        token = NewToken(workload.queries[copy], workload.new_keys[copy], workload.new_values[copy], append)
        sites.append(AttentionSite(token, attend))
    step = TokenStep(weights, sites, workload.sequences, _ops(queries.device))
    return LevelLaunch(step, 1, weight_bytes(case.model, case.batch, tensor_parallel, case.dtype))


def _ops(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        return layer_ops
    from locks_kernels import layer_triton

    return layer_triton
