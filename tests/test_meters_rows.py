"""Meters in a measurement: readings per round, energy per token, and what the clocks make of a row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from comparison_fakes import record as compared
from fake_nvml import SECOND, FakeNvml
from harness_fakes import FakeTimer, bench, tiny_case, tiny_plan

from harness import environment
from harness.backend import Backend
from harness.backends.sdpa import Sdpa
from harness.measure import measure_case
from harness.meters import session
from harness.meters.device import VISIBLE, Identity
from harness.meters.energy import EnergyWindow
from harness.meters.gpu import Gpu
from harness.meters.session import open_meters
from harness.meters.throttle import set_slow_rounds_aside
from harness.outcome import judge
from harness.record import Outcome, Record
from reports.rows import rows


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.0)


def gpu(nvml: FakeNvml) -> Gpu:
    return Gpu(nvml, 1, nvml.clock)


# --- in a measurement


class MovingTimer(FakeTimer):
    """Each sample takes time on the clock of the fake device."""

    def __init__(self, nvml: FakeNvml, **more: Any) -> None:
        super().__init__(self.take, **more)
        self.nvml = nvml

    def take(self) -> float:
        self.nvml.now += 1e-3
        return 5e5  # of each of two layers


def measured(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch | None = None, **changes: Any) -> Record:
    meters = open_meters("cuda", nvml, SECOND)
    case = tiny_case()
    made: dict[str, Backend] = {"sdpa": Sdpa()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "LEAST_S", 1.0)
        patch.setattr(session.time, "monotonic", nvml.clock)
        patch.setattr("harness.meters.energy.time.time", nvml.clock)
        patch.setattr(session, "EnergyWindow", lambda gpu: EnergyWindow(gpu, nvml.clock))
        timer = MovingTimer(nvml)
        (record,) = measure_case(case, tiny_plan(case), made, {"sdpa": "k"}, bench(timer, meters=meters, **changes), print)
    json.loads(record.to_json())
    return record


def test_a_record_holds_the_readings_of_every_round() -> None:
    record = measured(FakeNvml())
    meters = record.meters or {}
    assert record.outcome is Outcome.OK and record.rounds_ns
    for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "events"):
        assert len(meters[name]) == len(record.rounds_ns), name
    assert (meters["default_sm_mhz"], meters["power_limit_w"], meters["idle_w"]) == (1980, 700, 400)
    assert meters["slow_share"] == 0 and meters["dram_active_share"] == 0.875
    assert meters["energy"]["method"] == "counter" and meters["energy"]["seconds"] >= 1
    # 400 W for 1 ms a sample of two layers; the model has two layers, and the case two sequences
    assert record.energy_j_per_token == pytest.approx(400 * 1e-3 / 2, rel=0.05)


def test_a_mig_slice_has_a_time_and_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "MIG-12345678-0000-0000-0000-000000000000")
    record = measured(FakeNvml())
    assert record.outcome is Outcome.OK and record.energy_j_per_token is None
    assert record.meters and record.meters["source"] is None and "MIG slice" in record.meters["reason"]


def test_unknown_energy_is_null() -> None:
    record = measured(FakeNvml("energy", "instant", "average", "gpm"))
    assert record.outcome is Outcome.OK and record.energy_j_per_token is None
    meters = record.meters or {}
    assert meters["energy"]["joules"] is None and meters["energy"]["reason"] and meters["idle_w"] is None
    assert set(meters["power_w"]) == {None} and meters["dram_active_share"] is None
    assert {"instant_power", "average_power", "energy_counter", "dram_activity"} <= set(meters["missing"])


def test_no_nvml_and_no_gpu_are_no_failure() -> None:
    record = measured(FakeNvml("init"))
    assert record.outcome is Outcome.OK and "does not answer" in (record.meters or {})["reason"]
    assert open_meters("cpu") is session.ABSENT


def test_an_error_while_energy_is_measured_keeps_the_time() -> None:
    nvml = FakeNvml()
    nvml.nvmlGpmSampleGet = lambda handle, sample: 1 / 0  # type: ignore[method-assign]
    record = measured(nvml)
    assert record.outcome is Outcome.OK and record.rounds_ns and record.energy_j_per_token is None
    assert "ZeroDivisionError" in (record.meters or {})["energy"]["reason"]


def test_doctor_says_what_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import doctor

    monkeypatch.setattr(environment, "gpu", lambda: {"name": "GPU"})
    for nvml, good, said in (
        (FakeNvml(), True, "power instant, idle 400 W"),
        (FakeNvml("instant", "energy"), False, "power average, idle 400 W; lacks energy_counter, instant_power"),
        (FakeNvml(mig=1), False, "MIG mode"),
    ):
        monkeypatch.setattr(session, "open_meters", lambda device, nvml=nvml: open_meters(device, nvml, SECOND))
        finding = doctor._meters()
        assert finding.good is good and said in finding.detail


# --- clocks


def on_gpu(clocks: list[float | None], **changes: Any) -> Record:
    """A record of a GPU with one round per clock, whose time follows from it."""
    meters = {"sm_mhz": clocks, "default_sm_mhz": 1980.0, "events": [["thermal slowdown"]] * len(clocks)} | changes
    made = compared([[100e3 * 1980 / (clock or 1980)] * 4 for clock in clocks], bytes={"kv": 1}, meters=meters)
    set_slow_rounds_aside(made)
    judge(made)
    return made


def test_half_the_clock_for_ever_is_throttled_and_the_report_renders() -> None:
    record = on_gpu([990.0] * 20)
    assert record.outcome is Outcome.THROTTLED and len(record.rounds_ns or []) == 20
    assert "100% of the rounds" in (record.reason or "") and "thermal slowdown" in (record.reason or "")
    (row,) = rows([record])
    assert row["latency_us"] == pytest.approx(200) and row["speedup_vs_best_dense"] is None


def test_a_few_slow_rounds_are_set_aside_counted_and_kept() -> None:
    record = on_gpu([1980.0] * 9 + [1000.0])
    assert record.outcome is Outcome.OK and len(record.rounds_ns or []) == 9
    meters = record.meters or {}
    assert meters["slow_share"] == 0.1 and list(meters["set_aside_ns"]) == ["9"]
    assert meters["set_aside_ns"]["9"][0] == pytest.approx(198e3)


def test_the_power_cap_alone_is_a_steady_state() -> None:
    record = on_gpu([1200.0] * 10, events=[["power cap"]] * 10)
    assert record.outcome is Outcome.OK and len(record.rounds_ns or []) == 10
    assert (record.meters or {})["power_capped_share"] == 1 and (record.meters or {})["slow_share"] == 0
    with_heat = on_gpu([1200.0] * 10, events=[["power cap", "thermal slowdown"]] * 10)
    assert with_heat.outcome is Outcome.THROTTLED
    assert on_gpu([1200.0] * 10, events=[None] * 10).outcome is Outcome.THROTTLED


def test_unknown_clocks_accuse_nobody() -> None:
    assert on_gpu([None] * 10).outcome is Outcome.OK
    assert on_gpu([500.0] * 10, default_sm_mhz=None).outcome is not Outcome.THROTTLED


def test_the_power_limit_is_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    nvml = FakeNvml()
    for name in ("nvmlInit", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMigMode"):
        monkeypatch.setattr(pynvml, name, getattr(nvml, name))
    monkeypatch.setattr("harness.meters.device.current_identity", lambda: SECOND)
    assert environment.power_limit_w() == 700
    monkeypatch.setattr("harness.meters.device.current_identity", lambda: Identity(None, None, 0))
    assert environment.power_limit_w() is None
