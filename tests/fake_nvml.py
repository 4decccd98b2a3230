"""A fake of the part of NVML that the meters use: two GPUs whose readings are scripted, on a clock of their own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from harness.meters.device import Identity

UUIDS = ("GPU-aaaa1111-0000-0000-0000-000000000000", "GPU-bbbb2222-0000-0000-0000-000000000000")
PCI = ("00000000:1a:00.0", "00000000:3b:00.0")
SECOND = Identity(UUIDS[1].removeprefix("GPU-"), PCI[1], 0)


class FakeError(Exception):
    pass


class FakeNvml:
    """Stands for the module pynvml.  Handles are the numbers 0 and 1.

    unsupported   names of functions that raise, and "instant" for the power field
    clock         seconds; time passes only as `now` is moved.  power(seconds) -> W
    tick_s        the energy counter moves only this often
    """

    NVMLError = FakeError
    NVML_SUCCESS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT = 0, 1, 2, 0, 186
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_DRAM_BW_UTIL = 1, 10

    def __init__(self, *unsupported: str, power: Callable[[float], float] = lambda now: 400.0, **changes: Any) -> None:
        self.unsupported, self.power, self.now, self.tick_s = set(unsupported), power, 1000.0, 0.02
        self.sm_mhz: Callable[[], float] = lambda: 1980.0
        self.mig, self.event_bits, self.asked, self.stale = 0, 0, [], False
        vars(self).update(changes)

    def clock(self) -> float:
        return self.now

    def _answer(self, name: str, value: Any) -> Any:
        self.asked.append(name)
        if name in self.unsupported:
            raise FakeError("Not Supported")
        return value

    def nvmlInit(self) -> None:
        self._answer("init", None)

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in UUIDS:
            raise FakeError("Not Found")
        return UUIDS.index(uuid) + 10  # a handle is true, whichever device it is

    def nvmlDeviceGetHandleByPciBusId(self, pci: str) -> int:
        if pci not in PCI:
            raise FakeError("Not Found")
        return PCI.index(pci) + 20

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        return self._answer("mig", (self.mig, self.mig))

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> float:
        return self._answer("clock", self.sm_mhz() if kind == self.NVML_CLOCK_SM else 3201)

    def nvmlDeviceGetDefaultApplicationsClock(self, handle: int, kind: int) -> float:
        return self._answer("default", 1980)

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> float:
        return self._answer("max", 2000)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> float:
        return self._answer("temperature", 45)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self._answer("events", self.event_bits)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return self._answer("limit", 700_000)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._answer("average", int(self.power(self.now - 1.0) * 1000))

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        self._answer("fields", None)
        missing = 3 if "instant" in self.unsupported else self.NVML_SUCCESS
        seconds = 1.0 if self.stale else self.now
        value = SimpleNamespace(uiVal=int(self.power(self.now) * 1000))
        return [SimpleNamespace(nvmlReturn=missing, timestamp=int(seconds * 1e6), value=value)]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        ticks = int(self.now / self.tick_s)
        return self._answer("energy", int(ticks * self.tick_s * self.power(self.now) * 1000))

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> Any:
        return SimpleNamespace(isSupportedDevice=self._answer("gpm", 1))

    def nvmlGpmSampleAlloc(self) -> list[float]:
        return []

    def nvmlGpmSampleGet(self, handle: int, sample: list[float]) -> list[float]:
        sample.append(self.now)
        return sample

    def nvmlGpmSampleFree(self, sample: list[float]) -> None:
        sample.clear()

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace()])

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        assert request.sample2[0] > request.sample1[0] and request.metrics[0].metricId == 10
        request.metrics[0].nvmlReturn, request.metrics[0].value = self.NVML_SUCCESS, 87.5
        return request
