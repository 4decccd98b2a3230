"""Traces: what the attention layers of one prompt saw and asked, kept on disk so that every selector gets the same.

One trace is about 25 KB a token for SmolLM2-135M.  Plain tensors and numbers only, nothing that is executed when read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from harness.errors import UserError
from locks_kernels.selectors.base import Layer, Steps
from locks_kernels.selectors.rope import Rope
from locks_kernels.shapes import DecodeShape

FORMAT = 1


@dataclass
class Trace:
    """source         what it is: model, task, seed, prompt and answer, as plain data
    keys, values   bf16 [layers, H, N, D], positions applied
    queries        fp32 [layers, S, HQ, D], of the steps
    positions      int64 [S]: the token that a step feeds; it sees positions + 1 tokens
    answers        int64 [S]: which answer the step's next token belongs to
    observed       fp32 [layers, HQ, W, D]: of the last prompt tokens
    cos, sin       fp32 [N, width]
    carriers       token indices of each answer's carrier; empty where there is none
    agrees         share of the answers' tokens that the model itself would have said
    importance     fp32 [layers, H, N]: KVzip's, if it was asked for
    shared_basis   fp32 [layers, H, D, D]: principal axes of other text, as columns
    """

    source: dict[str, Any]
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    positions: torch.Tensor
    answers: torch.Tensor
    prompt: int
    context: int
    system: int
    carriers: list[list[int]]
    observed: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    interleaved: bool = False
    agrees: float | None = None
    importance: torch.Tensor | None = None
    shared_basis: torch.Tensor | None = None

    @property
    def layers(self) -> int:
        return self.keys.shape[0]

    @property
    def shape(self) -> DecodeShape:
        return DecodeShape(self.queries.shape[2], self.keys.shape[1], self.keys.shape[3])

    def layer(self, index: int) -> Layer:
        """What a selector is given of one layer."""
        heads = self.keys.shape[1]
        return Layer(
            index=index,
            keys=self.keys[index].float(),
            values=self.values[index].float(),
            prompt=self.prompt,
            context=self.context,
            system=self.system,
            observed=None if self.observed is None else self.observed[index].unflatten(0, (heads, -1)),
            rope=None if self.cos is None or self.sin is None else Rope(self.cos, self.sin, self.interleaved),
            importance=None if self.importance is None else self.importance[index],
            importances=self.importance,
            shared_basis=None if self.shared_basis is None else self.shared_basis[index],
            seed=int(self.source.get("seed", 0)),
        )

    def steps(self, index: int) -> Steps:
        return Steps(self.queries[index].unflatten(1, (self.keys.shape[1], -1)), self.positions + 1)


def key_of(source: dict[str, Any]) -> str:
    """Hash of what makes a trace the same one again."""
    return hashlib.sha256(json.dumps([FORMAT, source], sort_keys=True).encode()).hexdigest()[:24]


def default_directory() -> Path:
    """Where traces are kept: under XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "locks-bench" / "traces"


class TraceCache:
    """Traces in a directory, one file each.  UserError if it cannot be written."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_directory()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"traces cannot be kept in {self.directory} ({error.strerror}); use --traces DIR") from error

    def get(self, source: dict[str, Any], make: Callable[[], Trace]) -> Trace:
        """The trace of `source` from disk, or made and kept.  A file that cannot be read is made again."""
        path = self.directory / f"{key_of(source)}.pt"
        if path.exists():
            try:
                found = Trace(**torch.load(path, weights_only=True))
                if found.source == source:
                    return found
            except Exception:  # a damaged file may break its reader anywhere
                path.unlink(missing_ok=True)
        trace = make()
        self._write(path, trace)
        return trace

    def _write(self, path: Path, trace: Trace) -> None:
        beside = path.with_suffix(f".{os.getpid()}")
        try:
            torch.save({field.name: getattr(trace, field.name) for field in fields(Trace)}, beside)
            beside.replace(path)
        except (OSError, RuntimeError) as error:
            beside.unlink(missing_ok=True)
            raise UserError(f"a trace cannot be written to {self.directory} ({error}); use --traces DIR") from error
