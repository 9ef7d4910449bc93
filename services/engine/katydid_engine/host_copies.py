"""Copies between host and device that nobody waits for.

From pageable memory a driver may wait for the stream before it copies. Page-locked memory of torch's allocator is not
given again before the copies that read it are done, so what is copied here may be forgotten at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Arriving", "floats", "integers", "to_device", "to_host", "together_to_host"]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def integers(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)


def floats(values: Sequence[float], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.float32), device)


def to_host(values: Tensor) -> Tensor:
    """A copy, on a GPU in page-locked memory and complete when an ``Arriving`` that is made later has arrived."""
    return values.to("cpu", non_blocking=True) if values.is_cuda else values.clone()


def together_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As ``to_host``, of several; those that lie in one memory come by one copy of it."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) != 1:
        return [to_host(tensor) for tensor in tensors]
    whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())
    host = to_host(whole).untyped_storage()
    return [
        torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())
        for tensor in tensors
    ]


class Arriving:
    """The moment on a device's stream at which all that was copied before is on the host."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._done_at: float | None = None
        self._late = False
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is None or self._done_at is not None:
            return
        self._late = self._event.query()  # type: ignore[no-untyped-call]
        self._event.synchronize()
        self._done_at = time.monotonic()

    def done_at(self, before: Arriving | None) -> float | None:
        """When the device was done, on this process's monotonic clock, when both have arrived; None on a host. Where
        nobody waited then, it is told by the device's clock from ``before``, and never later than it was seen."""
        if self._late and before is not None and before._done_at is not None:
            after = self.seconds_since(before)
            assert after is not None
            assert self._done_at is not None
            self._done_at = min(self._done_at, before._done_at + after)
        self._late = False
        return self._done_at

    def seconds_since(self, other: Arriving) -> float | None:
        """On the device, when both have arrived; None on a host."""
        if self._event is None or other._event is None:
            return None
        return float(other._event.elapsed_time(self._event)) / 1000
