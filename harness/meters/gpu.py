"""One GPU's readings through NVML, each probed once: what a device does not offer is asked for only once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Bits of NVML's clock event reasons -> words.  Being idle or at the asked-for clocks is no event.
EVENTS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class PowerSample:
    """seconds: of time.time, when the device took it."""

    seconds: float
    watts: float


class Gpu:
    """Readings of one device; None where it has none.  `missing` says why, by the name of the reading."""

    def __init__(self, nvml: Any, handle: Any, clock_s: Callable[[], float] = time.time) -> None:
        self.nvml, self.handle, self._clock_s = nvml, handle, clock_s
        self.missing: dict[str, str] = {}
        self.power_kind = "instant" if self.instant_power() else "average" if self.average_w() is not None else None
        self.default_sm_mhz = self._default_sm_mhz()
        self.power_limit_w = _scaled(self._read("power_limit", "nvmlDeviceGetEnforcedPowerLimit"), 1e-3)
        for probe in (self.sm_mhz, self.memory_mhz, self.temperature_c, self.events, self.energy_j):
            probe()

    def sm_mhz(self) -> float | None:
        return self._read("sm_mhz", "nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM)

    def memory_mhz(self) -> float | None:
        return self._read("memory_mhz", "nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_MEM)

    def temperature_c(self) -> float | None:
        return self._read("temperature_c", "nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU)

    def energy_j(self) -> float | None:
        """Since the driver was loaded; moves in steps of tens of ms."""
        return _scaled(self._read("energy_counter", "nvmlDeviceGetTotalEnergyConsumption"), 1e-3)

    def average_w(self) -> float | None:
        """On newer devices an average over a second."""
        return _scaled(self._read("average_power", "nvmlDeviceGetPowerUsage"), 1e-3)

    def events(self) -> list[str] | None:
        """Why the clocks are lower than they could be, in words."""
        bits = self._read("events", "nvmlDeviceGetCurrentClocksEventReasons")
        return None if bits is None else [name for bit, name in EVENTS.items() if int(bits) & bit]

    def instant_power(self) -> PowerSample | None:
        """Power at one moment, with the time the device took it; None on devices that only know averages."""
        if "instant_power" in self.missing:
            return None
        nvml = self.nvml
        try:
            (field,) = nvml.nvmlDeviceGetFieldValues(self.handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        except nvml.NVMLError as error:
            self.missing["instant_power"] = str(error)
            return None
        if field.nvmlReturn != nvml.NVML_SUCCESS:
            self.missing["instant_power"] = f"NVML error {field.nvmlReturn}"
            return None
        return PowerSample(field.timestamp * 1e-6 or self._clock_s(), field.value.uiVal * 1e-3)

    def power_w(self) -> float | None:
        """The best there is; `power_kind` says which."""
        sample = self.instant_power()
        return self.average_w() if sample is None else sample.watts

    def reading(self) -> dict[str, Any]:
        """Everything once, by the names of a record's meters."""
        return {
            "sm_mhz": self.sm_mhz(),
            "memory_mhz": self.memory_mhz(),
            "power_w": self.power_w(),
            "temperature_c": self.temperature_c(),
            "events": self.events(),
        }

    def _default_sm_mhz(self) -> float | None:
        """What the device runs at if nothing holds it back."""
        clock = self._read("default_sm_mhz", "nvmlDeviceGetDefaultApplicationsClock", self.nvml.NVML_CLOCK_SM)
        if clock:
            return clock
        return self._read("highest_sm_mhz", "nvmlDeviceGetMaxClockInfo", self.nvml.NVML_CLOCK_SM)

    def _read(self, name: str, function: str, *arguments: Any) -> float | None:
        if name in self.missing:
            return None
        try:
            return float(getattr(self.nvml, function)(self.handle, *arguments))
        except self.nvml.NVMLError as error:
            self.missing[name] = str(error)
            return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
