"""How busy the DRAM was, by the device's own performance monitors (Hopper and newer), without a profiler."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from harness.meters.gpu import Gpu


class DramActivity:
    """Context manager; afterwards `share` is the mean share of the peak bandwidth in use, or None."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._nvml, self._handle = gpu, gpu.nvml, gpu.handle
        self._first: Any = None
        self.share: float | None = None

    def __enter__(self) -> DramActivity:
        self._first = self._sample()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        second = self._sample() if self._first is not None and error is None else None
        if second is not None:
            self.share = self._between(self._first, second)
        for sample in (self._first, second):
            if sample is not None:
                self._nvml.nvmlGpmSampleFree(sample)

    def _sample(self) -> Any:
        nvml = self._nvml
        if "dram_activity" in self._gpu.missing:
            return None
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                self._gpu.missing["dram_activity"] = "the device has no such monitors"
                return None
            return nvml.nvmlGpmSampleGet(self._handle, nvml.nvmlGpmSampleAlloc())
        except (nvml.NVMLError, AttributeError) as error:
            self._gpu.missing["dram_activity"] = str(error)
            return None

    def _between(self, first: Any, second: Any) -> float | None:
        nvml = self._nvml
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        request.sample1, request.sample2 = first, second
        request.metrics[0].metricId = nvml.NVML_GPM_METRIC_DRAM_BW_UTIL
        try:
            metric = nvml.nvmlGpmMetricsGet(request).metrics[0]
        except nvml.NVMLError as error:
            self._gpu.missing["dram_activity"] = str(error)
            return None
        if metric.nvmlReturn != nvml.NVML_SUCCESS or math.isnan(metric.value):
            return None
        return float(metric.value) / 100
