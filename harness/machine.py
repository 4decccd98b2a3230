"""Which machines a number may be compared between.  Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MachineKey:
    """What makes two measurements ones of the same machine.  No host name, serial number or UUID: another card of the same
    kind, driver and power limit counts as the same, and a key that changes at every start would compare nothing.

    units  multiprocessors of a GPU, or cores of a CPU.  driver, power_limit_w: None where unknown, and for a CPU.
    """

    name: str | None
    units: int | None
    driver: str | None
    power_limit_w: float | None

    @classmethod
    def of(cls, environment: dict[str, Any]) -> MachineKey:
        """Of a record's environment."""
        if gpu := environment.get("gpu"):
            return cls(gpu.get("name"), gpu.get("sm_count"), environment.get("driver"), gpu.get("power_limit_w"))
        cpu = environment.get("cpu") or {}
        return cls(cpu.get("name"), cpu.get("cores"), None, None)

    def differs(self, other: MachineKey) -> str | None:
        """Why numbers of the two cannot be compared, or None."""
        if self.name is None or other.name is None:
            return "a record does not say which machine it was made on"
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__}
        found = [f"{name} {ours} against {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
        return f"another machine: {', '.join(found)}" if found else None

    def slug(self) -> str:
        """Name of the folder that holds its baselines, such as "nvidia-h200-132-580.95.05-700w"."""
        limit = None if self.power_limit_w is None else f"{self.power_limit_w:.0f}w"
        parts = (self.name, self.units, self.driver, limit)
        text = "-".join("unknown" if part is None else str(part) for part in parts).lower()
        return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")
