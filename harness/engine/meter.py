"""Clocks, power and temperature of the GPU that an engine runs on, read from another process, without a CUDA context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.meters.device import Identity, NoMeters, find_handle
from harness.meters.gpu import Gpu


def open_meter(uuid: str | None) -> Callable[[], dict[str, Any]]:
    """Readings of the device with that UUID at each call; empty ones where there is none, or NVML does not know it."""
    if uuid is None:
        return dict
    import pynvml

    try:
        pynvml.nvmlInit()
        gpu = Gpu(pynvml, find_handle(pynvml, Identity(uuid, None, 0)))
    except (pynvml.NVMLError, NoMeters):
        return dict
    return lambda: {"default_sm_mhz": gpu.default_sm_mhz, **gpu.reading()}
