"""What a GPU did while something was called: its kernels and copies, one after the other."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from katydid_engine.rank_slice.phases import KernelSpan

__all__ = ["record_timeline"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def record_timeline(call: Callable[[], object]) -> list[KernelSpan]:
    """In order of their starts. Empty without a GPU."""
    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [KernelSpan(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") in _ON_DEVICE]
    return sorted(spans, key=lambda span: span.start)
