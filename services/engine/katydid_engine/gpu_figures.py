"""Memory and temperature of the GPUs this process can see, read from NVML when Prometheus asks.

The driver's own library through ctypes: two figures are no reason for a dependency, and a cluster that has NVIDIA's
dcgm-exporter watches the same things there. A machine without the library shows no series.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

__all__ = ["GpuFigures", "GpuReading", "Nvml"]

_SUCCESS = 0
_CORE_SENSOR = 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU now; bytes and degrees Celsius."""

    index: int
    used_bytes: int
    total_bytes: int
    celsius: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """`library` is the loaded libnvidia-ml. Raises OSError when NVML refuses."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices: list[ctypes.c_void_p] = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            self._devices.append(device)

    def read(self) -> list[GpuReading]:
        """Of every GPU. Raises OSError, as when one has fallen off its bus."""
        readings = []
        for index, device in enumerate(self._devices):
            memory, celsius = _Memory(), ctypes.c_uint()
            self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            self._call("nvmlDeviceGetTemperature", device, ctypes.c_int(_CORE_SENSOR), ctypes.byref(celsius))
            readings.append(GpuReading(index, memory.used, memory.total, celsius.value))
        return readings

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != _SUCCESS:
            raise OSError(f"{function} returned {code}")


class GpuFigures:
    """A collector for a metrics registry."""

    def __init__(self) -> None:
        self._nvml: Nvml | None = None
        try:
            self._nvml = Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
        except OSError as error:
            logger.info("no figures of GPUs: %s", error)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The families, without series where NVML is missing or fails."""
        from prometheus_client.core import GaugeMetricFamily

        used = GaugeMetricFamily("katydid_engine_gpu_used_bytes", "GPU memory in use, by everyone", labels=["gpu"])
        total = GaugeMetricFamily("katydid_engine_gpu_total_bytes", "GPU memory in all", labels=["gpu"])
        celsius = GaugeMetricFamily("katydid_engine_gpu_temperature_celsius", "GPU temperature", labels=["gpu"])
        try:
            readings = self._nvml.read() if self._nvml is not None else []
        except OSError as error:
            logger.warning("GPUs cannot be read: %s", error)
            readings = []
        for gpu in readings:
            for family, value in ((used, gpu.used_bytes), (total, gpu.total_bytes), (celsius, gpu.celsius)):
                family.add_metric([str(gpu.index)], value)
        yield from (used, total, celsius)
