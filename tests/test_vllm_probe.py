"""The probe that tests inside vLLM judge a decode step with, on a step made with vLLM faked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_world import BUDGET, LONG, PAGE, SHORT, AppendingStages, prefilled

from locks_kernels.decode import ReferenceStages
from locks_kernels.vllm_plugin import layers


@pytest.mark.parametrize("stages", [ReferenceStages, AppendingStages])
def test_the_probe_of_the_tests_inside_vllm_sees_what_it_should(
    world: Any, stages: type[ReferenceStages], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right step passes; a table without the best page, and an output of another table, do not."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "in_vllm"))
    from probe import SCORE_SHARE, Probe

    monkeypatch.setattr(layers.Served, "stages", layers.Served.stages)  # put back behind the test
    w, probe = world(stages=stages), Probe()
    probe.install()
    prefilled(w)
    w.step([(LONG, 190, 1), (SHORT, 40, 1)])
    told = probe.judge(w.modules)
    assert (told["layers"], told["rows"], told["selected"]) == (2, 4, 2)
    assert told["lowest"] >= SCORE_SHARE and told["error"] < 0.01
    step = next(iter(probe.steps.values()))
    right = step["tables"].clone()
    step["tables"][0, :, 1:-1] = torch.arange(1, BUDGET // PAGE - 1).flip(0) % 11 + 1
    step["tables"][0] = step["tables"][0].sort(-1).values
    worse = probe.judge(w.modules)
    assert worse["lowest"] < SCORE_SHARE or worse["error"] > 0.01
    step["tables"].copy_(right)
    step["output"] += 0.5
    assert probe.judge(w.modules)["error"] > 0.1
