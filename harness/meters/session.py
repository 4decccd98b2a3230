"""Meters of a run: opened once in the process that measures, then one context per case, which hands over its readings."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from harness.meters.activity import DramActivity
from harness.meters.device import Identity, NoMeters, current_identity, find_handle
from harness.meters.energy import LEAST_S, EnergyWindow
from harness.meters.gpu import Gpu
from harness.meters.throttle import set_slow_rounds_aside

if TYPE_CHECKING:
    from harness.contestant import Contestant
    from harness.record import Record

IDLE_SAMPLES, IDLE_SECONDS = 5, 0.1
LONGEST_S = 1.1 * LEAST_S  # energy windows aim at this
MOST_SAMPLES = 20_000  # of one energy window: each holds two events per launch


class CaseMeters(Protocol):
    """Of one case: readings round by round, then what they mean for each record."""

    def round(self, backend: str) -> None: ...
    def fill(self, record: Record, contestant: Contestant) -> None: ...


class Meters(Protocol):
    def case(self) -> AbstractContextManager[CaseMeters]: ...


class Absent:
    """No meters, and why; None on a CPU, where nobody asks."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason

    def case(self) -> Absent:
        return self

    def __enter__(self) -> Absent:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def round(self, backend: str) -> None:
        pass

    def fill(self, record: Record, contestant: Contestant) -> None:
        record.meters = {"source": None, "reason": self.reason} if self.reason else None


ABSENT = Absent()


class GpuMeters:
    """Of one GPU that nobody uses yet: its idle power is read at once."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.idle_w = _idle(gpu)

    def case(self) -> GpuCaseMeters:
        return GpuCaseMeters(self.gpu, self.idle_w)


class GpuCaseMeters:
    def __init__(self, gpu: Gpu, idle_w: float | None) -> None:
        self._gpu, self._idle_w = gpu, idle_w
        self._rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def __enter__(self) -> GpuCaseMeters:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def round(self, backend: str) -> None:
        """Read everything once, at the end of a round of `backend`, while the clocks are still those it ran at."""
        self._rounds[backend].append(self._gpu.reading())

    def fill(self, record: Record, contestant: Contestant) -> None:
        """Put the readings into the record, set slow rounds aside, and measure the energy of more of the same launches."""
        gpu, rounds = self._gpu, self._rounds[record.backend]
        record.meters = {
            "source": "nvml",
            "power_kind": gpu.power_kind,
            "default_sm_mhz": gpu.default_sm_mhz,
            "power_limit_w": gpu.power_limit_w,
            "idle_w": self._idle_w,
            **{name: [reading[name] for reading in rounds] for name in (rounds[0] if rounds else ())},
        }
        set_slow_rounds_aside(record)
        try:
            self._energy(record, contestant)
        except Exception as error:  # a by-product: the headline stands without it
            record.meters["energy"] = {"joules": None, "reason": f"not measured: {type(error).__name__}"}
        record.meters["missing"] = dict(gpu.missing)

    def _energy(self, record: Record, contestant: Contestant) -> None:
        assert record.meters is not None
        sample_s = median(contestant.rounds[-1]) * contestant.steps * 1e-9
        count = min(math.ceil(LONGEST_S / max(sample_s, 1e-6)), MOST_SAMPLES)
        steps, activity = 0, DramActivity(self._gpu)
        with EnergyWindow(self._gpu) as window, activity:
            start = time.monotonic()
            while time.monotonic() - start < LEAST_S:  # few samples may end early: their gaps are idle time and count
                contestant.run.samples(count)
                steps += count * contestant.steps
        energy = window.energy
        record.meters["energy"] = vars(energy) | {"steps": steps}
        record.meters["dram_active_share"] = activity.share
        if energy.joules is not None:
            layers = record.case["model"]["layers"] if record.case["level"] == "attention" else 1
            record.energy_j_per_token = energy.joules / steps * layers / record.case["batch"]


def open_meters(device: str, library: Any = None, identity: Identity | None = None) -> Absent | GpuMeters:
    """The meters of the current device, or Absent with the reason.  library: what to use as pynvml; identity: which device."""
    if device != "cuda":
        return ABSENT
    nvml = library or _pynvml()
    try:
        nvml.nvmlInit()
        return GpuMeters(Gpu(nvml, find_handle(nvml, identity or current_identity())))
    except NoMeters as reason:
        return Absent(str(reason))
    except nvml.NVMLError as error:
        return Absent(f"NVML does not answer: {error}")


def _pynvml() -> Any:
    import pynvml

    return pynvml


def _idle(gpu: Gpu) -> float | None:
    watts = []
    for _ in range(IDLE_SAMPLES):
        watts.append(gpu.power_w())
        time.sleep(IDLE_SECONDS)
    known = [one for one in watts if one is not None]
    return median(known) if known else None
