"""One writer, several readers: plans from rank 0 to the other ranks of its group, through shared memory.

    bytes 0..7                      bytes written so far, uint64
    bytes 64 (1 + r) .. +7          bytes that reader r has read so far, uint64
    from 64 (1 + readers) on        the ring; a record is its length (uint64) and its body, padded to 8 bytes

Counters only grow; a position is a counter modulo the ring's size. Each reader sleeps on an eventfd of its own, which
the writer rings after publishing a record.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from collections.abc import Sequence

__all__ = ["PlanReader", "PlanWriter", "RingBroken", "ring_bytes"]

_LINE = 64
_COUNTER = struct.Struct("<Q")
_FULL_POLL_S = 0.0005


class RingBroken(RuntimeError):  # noqa: N818
    """A reader has not taken a record for longer than the writer waits."""


def ring_bytes(readers: int, capacity: int) -> int:
    """Size of the shared memory for a ring of ``capacity`` bytes (a multiple of 8)."""
    return _LINE * (1 + readers) + capacity


class _Ring:
    def __init__(self, descriptor: int, readers: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._start = _LINE * (1 + readers)
        self.capacity = len(self._memory) - self._start

    def counter(self, line: int) -> int:
        value: int = _COUNTER.unpack_from(self._memory, _LINE * line)[0]
        return value

    def set_counter(self, line: int, value: int) -> None:
        _COUNTER.pack_into(self._memory, _LINE * line, value)

    def put(self, position: int, data: bytes) -> None:
        offset = position % self.capacity
        head = data[: self.capacity - offset]
        self._memory[self._start + offset : self._start + offset + len(head)] = head
        if len(head) < len(data):
            tail = data[len(head) :]
            self._memory[self._start : self._start + len(tail)] = tail

    def get(self, position: int, size: int) -> bytes:
        offset = position % self.capacity
        head = self._memory[self._start + offset : self._start + min(offset + size, self.capacity)]
        return head + self._memory[self._start : self._start + size - len(head)]


def _padded(size: int) -> int:
    return -(-size // 8) * 8


class PlanWriter:
    """Rank 0's end. ``bells`` are the readers' eventfds, in order."""

    def __init__(self, descriptor: int, bells: Sequence[int], *, patience_s: float = 60.0) -> None:
        self._ring = _Ring(descriptor, len(bells))
        self._bells = tuple(bells)
        self._patience_s = patience_s

    def write(self, body: bytes) -> None:
        """Publishes a record; waits while a reader is a whole ring behind.

        Raises:
            ValueError: the record is larger than the ring.
            RingBroken: a reader stays behind for ``patience_s``.
        """
        size = _COUNTER.size + _padded(len(body))
        if size > self._ring.capacity:
            raise ValueError(f"a record of {len(body)} bytes does not fit a ring of {self._ring.capacity}")
        written = self._ring.counter(0)
        given_up = time.monotonic() + self._patience_s
        while written + size - min(map(self._ring.counter, range(1, len(self._bells) + 1))) > self._ring.capacity:
            if time.monotonic() > given_up:
                raise RingBroken(f"a rank has read nothing for {self._patience_s} s")
            time.sleep(_FULL_POLL_S)
        self._ring.put(written, _COUNTER.pack(len(body)) + body)
        self._ring.set_counter(0, written + size)
        for bell in self._bells:
            os.eventfd_write(bell, 1)


class PlanReader:
    """The end of reader ``index`` of ``readers``."""

    def __init__(self, descriptor: int, index: int, readers: int, bell: int) -> None:
        self._ring = _Ring(descriptor, readers)
        self._line = 1 + index
        self._bell = bell

    def read(self, timeout_s: float, also: int | None = None) -> bytes | None:
        """The next record, or None after ``timeout_s``, or as soon as descriptor ``also`` becomes readable."""
        read = self._ring.counter(self._line)
        while self._ring.counter(0) == read:
            watched = [self._bell] if also is None else [self._bell, also]
            ready = select.select(watched, [], [], timeout_s)[0]
            if self._bell in ready:
                os.eventfd_read(self._bell)
            elif self._ring.counter(0) == read:
                return None
        size: int = _COUNTER.unpack(self._ring.get(read, _COUNTER.size))[0]
        body = self._ring.get(read + _COUNTER.size, size)
        self._ring.set_counter(self._line, read + _COUNTER.size + _padded(size))
        return body
