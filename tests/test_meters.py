"""Meters on a fake NVML: what is unknown is null with a reason, and no reading is that of another device or time."""

from __future__ import annotations

import threading
import time

import pytest
from fake_nvml import PCI, SECOND, UUIDS, FakeNvml

from harness.meters import session
from harness.meters.device import VISIBLE, Identity, NoMeters, find_handle
from harness.meters.energy import EnergyWindow, integrate
from harness.meters.gpu import Gpu, PowerSample


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.0)


def gpu(nvml: FakeNvml) -> Gpu:
    return Gpu(nvml, 1, nvml.clock)


# --- which device


@pytest.mark.parametrize(
    ("visible", "device", "handle"),
    [
        (None, SECOND, 11),
        ("1", SECOND, 11),
        ("1,0", Identity(UUIDS[0], None, 1), 10),
        (UUIDS[1], SECOND, 11),
        ("GPU-bbbb", Identity(None, None, 0), 1),
        ("", Identity(None, PCI[1], 0), 21),
        ("1", Identity("GPU-of-another-kind", PCI[0], 0), 20),
    ],
)
def test_devices_match_by_uuid_or_pci(
    visible: str | None, device: Identity, handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    assert find_handle(FakeNvml(), device) == handle


@pytest.mark.parametrize(("visible", "device"), [("0", Identity("x", None, 0)), ("GPU-", Identity(None, None, 0))])
def test_no_match_is_no_reading_rather_than_that_of_index_0(
    visible: str, device: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(NoMeters, match="no NVML device"):
        find_handle(FakeNvml(), device)


def test_a_mig_slice_has_no_meters(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoMeters, match="MIG mode"):
        find_handle(FakeNvml(mig=1), SECOND)
    assert find_handle(FakeNvml("mig"), SECOND) == 11, "a GPU that cannot be sliced"
    monkeypatch.setenv(VISIBLE, "MIG-12345678-0000-0000-0000-000000000000")
    with pytest.raises(NoMeters, match="MIG slice"):
        find_handle(FakeNvml(), SECOND)


# --- single readings


def test_what_a_device_lacks_is_null_with_a_reason_and_asked_once() -> None:
    nvml = FakeNvml("energy", "temperature", "fields", "events", "clock")
    one = gpu(nvml)
    for _ in range(3):
        assert one.energy_j() is one.temperature_c() is one.instant_power() is one.events() is one.sm_mhz() is None
    assert {nvml.asked.count(name) for name in ("energy", "temperature", "fields", "events")} == {1}
    assert one.missing["energy_counter"] == "Not Supported" and one.power_kind == "average"
    assert gpu(FakeNvml("instant", "average")).power_kind is None
    assert gpu(FakeNvml("default")).default_sm_mhz == 2000


def test_events_are_words_and_idle_is_none() -> None:
    assert gpu(FakeNvml(event_bits=0x1 | 0x2)).events() == []
    assert gpu(FakeNvml(event_bits=0x4 | 0x40)).events() == ["power cap", "hardware thermal slowdown"]


def test_power_is_that_of_now_where_the_device_knows_it() -> None:
    """The default reading of newer devices is an average over a second."""
    nvml = FakeNvml(power=lambda now: 700.0 if now >= 1000 else 100.0)
    assert gpu(nvml).power_w() == 700 and gpu(nvml).power_kind == "instant"
    nvml.unsupported.add("instant")
    assert gpu(nvml).power_w() == 100 and gpu(nvml).power_kind == "average"


# --- energy


def window(nvml: FakeNvml, seconds: float) -> EnergyWindow:
    with EnergyWindow(gpu(nvml), nvml.clock) as found:
        nvml.now += seconds
    return found


def test_a_short_window_of_a_counter_in_steps_is_refused() -> None:
    """5 ms of a counter that moves every 20 ms is 0 J or four times too much."""
    energy = window(FakeNvml(), 0.005).energy
    assert energy.joules is None and "0.005 s is shorter than 1 s" in (energy.reason or "")


def test_a_second_of_the_counter_is_right() -> None:
    energy = window(FakeNvml(), 1.25).energy
    assert energy.joules == pytest.approx(500, rel=0.03) and energy.method == "counter"


def test_a_counter_that_stands_still_is_unknown_and_not_zero() -> None:
    energy = window(FakeNvml(tick_s=1e6), 2.0).energy
    assert energy.joules is None and "did not move" in (energy.reason or "")


def test_without_counter_and_instantaneous_power_energy_is_unknown() -> None:
    energy = window(FakeNvml("energy", "instant"), 2.0).energy
    assert energy.joules is None and "no energy counter" in (energy.reason or "")


def test_a_step_of_power_integrates_within_5_percent() -> None:
    def step(now: float) -> float:
        return 100.0 if now < 0.5 else 700.0

    samples = [PowerSample(0.013 + 0.05 * at, step(0.013 + 0.05 * at)) for at in range(20)]
    joules, coverage = integrate(samples, 0.0, 1.0)
    assert joules == pytest.approx(400, rel=0.05) and coverage == pytest.approx(1.0)


def test_only_fresh_samples_of_the_window_count() -> None:
    before = [PowerSample(-1.0 + 0.05 * at, 50.0) for at in range(19)]
    good = [PowerSample(0.05 * at, 400.0) for at in range(11)]
    stale = [PowerSample(0.5, 400.0)] * 50
    joules, coverage = integrate([*before, *good, *stale], 0.0, 1.0)
    assert coverage == pytest.approx(0.5) and joules == pytest.approx(200)
    assert integrate(before, 0.0, 1.0) == (0.0, 0.0)


def test_the_thread_samples_often_enough_and_ends() -> None:
    nvml = FakeNvml("energy", power=lambda now: 250.0)
    one, before = Gpu(nvml, 1, time.time), threading.active_count()
    with EnergyWindow(one, least_s=0.2) as found:
        for _ in range(30):
            nvml.now = time.time()
            time.sleep(0.01)
    assert found.energy.method == "integrated" and found.energy.joules == pytest.approx(250 * found.energy.seconds, rel=0.05)
    assert found.energy.coverage and found.energy.coverage > 0.9
    assert threading.active_count() == before


def test_a_sensor_that_repeats_an_old_value_is_unknown() -> None:
    nvml = FakeNvml("energy", stale=True)
    with EnergyWindow(Gpu(nvml, 1, time.time), least_s=0.1) as found:
        time.sleep(0.15)
    assert found.energy.joules is None and found.energy.coverage == 0 and "cover 0%" in (found.energy.reason or "")
