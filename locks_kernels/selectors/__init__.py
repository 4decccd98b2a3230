"""Page and token selectors in plain torch: what each keeps, and what it reads for that.

Specifications, not fast kernels: harness.fidelity measures what they keep, harness.backends.selectors times those that have a
kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from locks_kernels.selectors.base import Declaration, Layer, Selector, Steps
from locks_kernels.selectors.boxes import CuboidMean, Quest, QuestAllLayers, QuestGroup
from locks_kernels.selectors.exact import Oracle, TokenMax
from locks_kernels.selectors.floors import RandomPages, SlidingWindow
from locks_kernels.selectors.kvzip import KVzip
from locks_kernels.selectors.locks import Locks, LocksTwoStage
from locks_kernels.selectors.moments import Centroid, MeanStdScalar, MeanStdVector, SecondOrder, SecondOrderFull, Unique
from locks_kernels.selectors.rocket import RocketKV
from locks_kernels.selectors.shadow import Landmarks, ShadowKV
from locks_kernels.selectors.shared import SharedBasis

__all__ = ["SELECTORS", "Declaration", "Layer", "Selector", "Steps"]

_MAKERS: list[Callable[[], Selector]] = [
    Oracle,
    TokenMax,
    lambda: Locks(8),
    lambda: Locks(4),
    lambda: Locks(2),
    lambda: Locks(8, "peak"),
    lambda: Locks(4, "peak"),
    lambda: Locks(2, "peak"),
    *(lambda first=first, times=times: LocksTwoStage(first, times) for first in (1, 2, 4) for times in (2, 4, 8)),  # type: ignore[misc]
    Quest,
    QuestAllLayers,
    QuestGroup,
    CuboidMean,
    Centroid,
    MeanStdScalar,
    MeanStdVector,
    Unique,
    SecondOrder,
    SecondOrderFull,
    lambda: SharedBasis("global", 8),
    lambda: SharedBasis("global", 32),
    lambda: SharedBasis("global", None, 8),
    lambda: SharedBasis("global", None, 4),
    lambda: SharedBasis("sequence", 8),
    lambda: SharedBasis("sequence", 8, centred=True),
    lambda: SharedBasis("sequence", 32),
    lambda: SharedBasis("sequence", None, 8),
    lambda: SharedBasis("sequence", None, 4),
    ShadowKV,
    Landmarks,
    RocketKV,
    lambda: RocketKV(evict=False),
    lambda: KVzip("pair"),
    lambda: KVzip("pair-uniform"),
    SlidingWindow,
    RandomPages,
]

SELECTORS: dict[str, Selector] = {selector.name: selector for selector in (make() for make in _MAKERS)}
