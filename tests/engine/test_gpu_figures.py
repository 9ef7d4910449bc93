"""GPU memory and temperature, from a library with NVML's functions compiled here."""

from __future__ import annotations

import subprocess
from pathlib import Path

from katydid_engine import gpu_figures
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.gpu_figures import GpuFigures, GpuReading, Nvml

# What NVML's header declares of the five functions, with two GPUs of which the second can be made to fail.
_NVML_C = """
typedef struct { unsigned long long total, free, used; } memory;
static int lost = 0;
void lose(void) { lost = 1; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(0x700000000000 + index);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *found) {
  unsigned index = (unsigned long)device & 1;
  if (index && lost) return 15;
  found->total = 150000000000ull; found->used = 140000000000ull + index; found->free = 0;
  return 0;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
  *celsius = sensor ? 999 : 60 + ((unsigned long)device & 1);
  return 0;
}
"""


def test_gpus_through_nvml(tmp_path: Path, monkeypatch) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(_NVML_C)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    load = gpu_figures.ctypes.CDLL
    loaded = load(str(library))
    assert Nvml(loaded).read() == [
        GpuReading(0, 140_000_000_000, 150_000_000_000, 60),
        GpuReading(1, 140_000_000_001, 150_000_000_000, 61),
    ]
    monkeypatch.setattr(gpu_figures.ctypes, "CDLL", lambda name: load(str(tmp_path / name)))
    metrics = EngineMetrics()
    registry = metrics.metrics.registry
    registry.register(GpuFigures())
    text = metrics.metrics.render()[0].decode()
    assert registry.get_sample_value("katydid_engine_gpu_used_bytes", {"gpu": "1"}) == 140_000_000_001
    assert 'katydid_engine_gpu_temperature_celsius{gpu="0"} 60.0' in text
    loaded.lose()
    assert "katydid_engine_gpu_used_bytes{" not in metrics.metrics.render()[0].decode()


def test_a_machine_without_the_driver_shows_no_gpu(monkeypatch) -> None:
    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpu_figures.ctypes, "CDLL", missing)
    metrics = EngineMetrics()
    metrics.metrics.registry.register(GpuFigures())
    assert "katydid_engine_gpu_used_bytes{" not in metrics.metrics.render()[0].decode()
