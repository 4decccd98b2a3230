"""Selectors of the fidelity table that have no step of their own to time: each is a row that says why, and whose time is its.

Imports no torch: `list` and the report read this, too.
"""

from __future__ import annotations

from typing import ClassVar

from harness.backend import Backend

PREFIX = "not timed"
SAME_STEP: dict[str, str] = {}  # selector -> the backend whose launches would be the very same, so that its time is this one's


class Untimed(Backend):
    reason: ClassVar[str]

    def unavailable(self) -> str:
        return f"{PREFIX}: {self.reason}"


def _same(selector: str, backend: str, reason: str) -> type[Untimed]:
    SAME_STEP[selector] = backend
    return _none(selector, f"{reason}; the launches and the bytes are those of `{backend}`, so its time is this one's")


def _none(selector: str, reason: str) -> type[Untimed]:
    return type(selector, (Untimed,), {"name": selector, "reason": reason})


_PER_QUERY_HEAD = (
    "keeps a table per query head, and attention kernels over pages take one per KV head; with G query heads it reads up to G "
    "times the keys and values of `quest-group`, whose score is the same"
)
Quest = _none("quest", _PER_QUERY_HEAD + ", and all of them in layers 0 and 1")
QuestAllLayers = _none("quest-all-layers", _PER_QUERY_HEAD)
Unique = _none(
    "unique", "chooses pages of half the cache's size, kernels here whole ones; `mean-std-scalar` is its score at the full size"
)
SecondOrder = _none(
    "second-order",
    "no kernel here reads its packed int4 directions; their bytes lie between those of `locks-r2` and `locks-r4`",
)
SecondOrderFull = _same("second-order-full", "oracle", "reads every key and sums a page's logits in another way")
TokenMax = _same("oracle-token-max", "oracle", "reads every key and takes a page's largest logit instead of the sum")
Landmarks = _same("shadowkv-landmarks", "centroid", "differs in how a group's scores are combined")
ShadowKV = _none(
    "shadowkv",
    "rebuilds low-rank keys and holds values in host memory, for which there is no kernel here; `centroid` is the score of its "
    "landmarks, of which it reads two a page",
)
RocketKV = _none(
    "rocketkv",
    "chooses single tokens by the strongest channels, for which there is no kernel here; by design it reads as many bytes as "
    "its budget, which is what `kvzip-pair-uniform` attends",
)
RocketKVSecondStage = _none(
    "rocketkv-second-stage", "chooses single tokens by the strongest channels, for which there is no kernel here"
)
KVzipPair = _none(
    "kvzip-pair",
    "how unevenly it spreads its tokens over heads depends on the model; `kvzip-pair-uniform` attends the same number evenly "
    "spread, which bounds it from below",
)
LokiPage8 = _same("loki-page-r8", "shared-svd-r8", "its axes come from another text")
LokiPage32 = _same("loki-page-r32", "shared-svd-r32", "its axes come from another text")
SharedSvd8Centred = _same("shared-svd-r8-centred", "shared-svd-r8", "leaves the mean out, which all pages have in common")

_QUANTISED = (
    "no kernel here reads quantised coefficients in a shared basis; it may read as many bytes a page as `locks` at rank 8, "
    "whose time is about what it could reach"
)
LokiPageInt8 = _none("loki-page-int8", _QUANTISED)
LokiPageInt4 = _none("loki-page-int4", _QUANTISED)
SharedSvdInt8 = _none("shared-svd-int8", _QUANTISED)
SharedSvdInt4 = _none("shared-svd-int4", _QUANTISED)


def _two_stage(first: int, times: int) -> type[Untimed]:
    return _none(
        f"locks-r{first}x{times}-r8",
        f"no kernel here scores the first {first} of 8 ranks and then a shortlist again; its bytes are in the fidelity table",
    )


LocksR1X2, LocksR1X4, LocksR1X8 = (_two_stage(1, times) for times in (2, 4, 8))
LocksR2X2, LocksR2X4, LocksR2X8 = (_two_stage(2, times) for times in (2, 4, 8))
LocksR4X2, LocksR4X4, LocksR4X8 = (_two_stage(4, times) for times in (2, 4, 8))
