"""Which NVML device a CUDA device is.  Never by index: CUDA_VISIBLE_DEVICES renumbers, and NVML does not follow it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Identity:
    """uuid: with or without "GPU-".  pci: "domain:bus:device.0" in hexadecimal.  index: of the CUDA device in this process."""

    uuid: str | None
    pci: str | None
    index: int


class NoMeters(Exception):
    """Why this device has no readings of its own."""


def current_identity() -> Identity:
    """Of torch's current CUDA device."""
    import torch

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    domain, bus, device = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    pci = None if domain is None or bus is None or device is None else f"{domain:08x}:{bus:02x}:{device:02x}.0"
    return Identity(str(properties.uuid) if getattr(properties, "uuid", None) else None, pci, index)


def find_handle(nvml: Any, device: Identity) -> Any:
    """NVML's handle of the device, which is a whole GPU.  NoMeters if there is none, or the device is a slice of one: a slice
    shares its clocks and its power supply with strangers.
    """
    visible = [entry.strip() for entry in os.environ.get(VISIBLE, "").split(",") if entry.strip()]
    named = visible[device.index] if device.index < len(visible) else ""
    if named.startswith("MIG-"):
        raise NoMeters("a MIG slice has no power, energy or clocks of its own")
    handle = _by_uuid(nvml, device.uuid) or _by_pci(nvml, device.pci) or _by_prefix(nvml, named)
    if handle is None:
        raise NoMeters("no NVML device has the UUID or PCI address of this CUDA device")
    try:
        sliced = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # a GPU that cannot be sliced says so with an error
        sliced = False
    if sliced:
        raise NoMeters("the GPU is in MIG mode: its power, energy and clocks are not those of one slice")
    return handle


def _by_uuid(nvml: Any, uuid: str | None) -> Any:
    if uuid is None:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except nvml.NVMLError:
        return None


def _by_pci(nvml: Any, pci: str | None) -> Any:
    if pci is None:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByPciBusId(pci)
    except nvml.NVMLError:
        return None


def _by_prefix(nvml: Any, named: str) -> Any:
    """CUDA_VISIBLE_DEVICES may hold the beginning of a UUID, if it is one device's only."""
    if not named.startswith("GPU-"):
        return None
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    found = [handle for handle in handles if str(nvml.nvmlDeviceGetUUID(handle)).startswith(named)]
    return found[0] if len(found) == 1 else None
