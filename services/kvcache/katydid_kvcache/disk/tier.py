"""The disk tier at work: one thread has groups of slots written, a second makes them durable, a pool reads.

A group is: invalidate, write the slots (in parallel), flush the segments, one LMDB transaction, and only then tell the
writers. A crash anywhere leaves either the row with its data, or no row. A row may outlive its slot's bytes (its
deletion was still queued); a read sees the other key in the slot's header and answers as absent.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import lmdb
from katydid_cache.layout import BlockLayout
from katydid_cache.records import Tier
from katydid_runtime.errors import DataCorruptError, NotFoundError
from xxhash import xxh3_128_digest

from katydid_kvcache.disk.catalog import Catalog, Row
from katydid_kvcache.disk.segments import SegmentFiles
from katydid_kvcache.disk.slot_header import HEADER_BYTES, SlotHeader
from katydid_kvcache.read_speeds import ReadSpeeds
from katydid_kvcache.slabs import Slot

__all__ = ["FULL", "DiskTier", "Done"]

Done = Callable[[OSError | None], None]

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk without room."""

_GROUP = 64
_BACKOFF_S = (1.0, 60.0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Write:
    header: SlotHeader
    slot: Slot
    slot_bytes: int
    payload: memoryview
    done: Done


@dataclass(frozen=True, slots=True)
class _Delete:
    key: bytes


@dataclass(frozen=True, slots=True)
class _Renew:
    row: Row


@dataclass(frozen=True, slots=True)
class _Erase:
    slot: Slot
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class _Barrier:
    done: Callable[[], None]


_Operation = _Write | _Delete | _Renew | _Erase | _Barrier


class DiskTier:
    """Reads and writes slots of `segments` and keeps `catalog` in step. Its methods belong to the loop's thread.

    `known` are the identities the catalogue has layouts of. After a failed write the disk is left alone for a while
    (`healthy` is False), longer with every failure.
    """

    def __init__(
        self,
        segments: SegmentFiles,
        catalog: Catalog,
        *,
        known: Iterable[bytes],
        threads: int,
        sync: bool,
        loop: asyncio.AbstractEventLoop,
        speeds: ReadSpeeds,
    ) -> None:
        self._segments = segments
        self._catalog = catalog
        self._known = set(known)
        self._sync = sync
        self._loop = loop
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._writers = ThreadPoolExecutor(threads, "disk-write")
        self._readers = ThreadPoolExecutor(threads, "disk-read")
        self._pages = threading.local()
        self._failures = 0
        self._retry_at = 0.0
        self._speeds = speeds
        self._reading = 0
        self._written: queue.Queue[tuple[list[_Operation], dict[int, OSError | None]] | None] = queue.Queue(1)
        self._workers = [
            threading.Thread(target=self._write_groups, name="disk-groups", daemon=True),
            threading.Thread(target=self._commit_groups, name="disk-commit", daemon=True),
        ]
        for worker in self._workers:
            worker.start()

    @property
    def healthy(self) -> bool:
        """Whether a write may be tried now."""
        return time.monotonic() >= self._retry_at

    def write(self, header: SlotHeader, slot: Slot, slot_bytes: int, payload: memoryview, done: Done) -> None:
        """Write a slot and its row; `done` is called on the loop once both are durable, or with the error.

        `payload` is page-aligned, whole pages long, and must not change until then.
        """
        self._queue.put(_Write(header, slot, slot_bytes, payload, done))

    def delete(self, identity: bytes, block_hash: bytes) -> None:
        """Forget where a block was; its slot may be written again at once."""
        self._queue.put(_Delete(identity + block_hash))

    def renew(self, row: Row) -> None:
        """Write a row anew, because its block's time has moved on. The slot's header keeps the time it began with."""
        self._queue.put(_Renew(row))

    def erase(self, slot: Slot, slot_bytes: int) -> None:
        """Make a slot's header unreadable, so that no scan brings its block back."""
        self._queue.put(_Erase(slot, slot_bytes))

    async def read(self, row: Row, slot_bytes: int, into: memoryview, size: int) -> None:
        """Read a block's slot into `into` (page-aligned, whole pages) and check header and payload (`size` bytes).

        Raises NotFoundError when the slot holds another block, DataCorruptError when its bytes are wrong, and OSError.
        `into` is written by a thread: don't reuse it before this returns, even when cancelled.
        """
        started = time.monotonic()
        self._reading += 1
        at_once = self._reading
        try:
            await self._loop.run_in_executor(self._readers, self._read, row, slot_bytes, into, size)
        finally:
            self._reading -= 1
        self._speeds.note(Tier.DISK, len(into), time.monotonic() - started, at_once=at_once)

    async def flush(self) -> None:
        """Wait until everything asked for before is done."""
        reached = self._loop.create_future()
        self._queue.put(_Barrier(lambda: None if reached.done() else reached.set_result(None)))
        await reached

    def close(self) -> None:
        """Finish what is queued, then stop the threads and close the files. Blocks."""
        self._queue.put(None)
        for worker in self._workers:
            worker.join()
        self._writers.shutdown()
        self._readers.shutdown()
        try:
            self._catalog.sync()
        except lmdb.Error as error:
            logger.error("index not flushed: %s", error)
        self._catalog.close()
        self._segments.close()

    def _write_groups(self) -> None:
        """The first thread: erases and writes slots of a group, and hands it on while the next one is written."""
        while True:
            group = [self._queue.get()]
            while len(group) < _GROUP and group[-1] is not None and not self._queue.empty():
                group.append(self._queue.get())
            operations = [operation for operation in group if operation is not None]
            if operations:
                self._written.put((operations, self._guarded(operations, self._write_slots)))
            if group[-1] is None:
                self._written.put(None)
                return

    def _commit_groups(self) -> None:
        """The second thread: makes a group durable, index last, and says so."""
        while (written := self._written.get()) is not None:
            operations, errors = written
            errors = self._guarded(operations, functools.partial(self._commit, errors=errors))
            self._loop.call_soon_threadsafe(_tell, operations, errors)

    def _guarded(
        self, group: list[_Operation], step: Callable[[list[_Operation]], dict[int, OSError | None]]
    ) -> dict[int, OSError | None]:
        """The outcome of a group's writes by identity; a defect fails them all, and only them."""
        try:
            return step(group)
        except Exception as error:
            logger.exception("disk commit failed")
            failure = OSError(f"internal error: {error}")
            return {id(operation): failure for operation in group if isinstance(operation, _Write)}

    def _write_slots(self, group: list[_Operation]) -> dict[int, OSError | None]:
        for operation in group:
            if isinstance(operation, _Erase):
                self._try_erase(operation)
        writes = [operation for operation in group if isinstance(operation, _Write)]
        return dict(zip(map(id, writes), self._writers.map(self._try_write, writes), strict=True))

    def _commit(self, group: list[_Operation], errors: dict[int, OSError | None]) -> dict[int, OSError | None]:
        """Flush what was written without error and change the index; the outcome of the group's writes."""
        writes = [operation for operation in group if isinstance(operation, _Write)]
        if self._sync:
            self._flush_segments(writes, errors)
        namespaces: dict[bytes, BlockLayout] = {}
        changes: list[tuple[bytes, bytes | None]] = []
        for operation in group:
            if isinstance(operation, _Delete):
                changes.append((operation.key, None))
            elif isinstance(operation, _Renew):
                changes.append((operation.row.key, operation.row.encode()))
            elif isinstance(operation, _Write) and errors[id(operation)] is None:
                header = operation.header
                row = Row.of(header, operation.slot)
                changes.append((row.key, row.encode()))
                if header.identity not in self._known:
                    namespaces[header.identity] = header.layout
        try:
            if changes:
                self._catalog.apply(namespaces.items(), changes)
            self._known.update(namespaces)
        except lmdb.Error as error:
            logger.error("index of the disk tier not changed: %s", error)
            failure = OSError(f"index: {error}")
            errors = {key: present or failure for key, present in errors.items()}
        self._judge(list(errors.values()))
        return errors

    def _try_write(self, write: _Write) -> OSError | None:
        page = self._page()
        page[:] = write.header.encode()
        try:
            slot = write.slot
            self._segments.write(slot.slab, write.slot_bytes, slot.index * write.slot_bytes, [page, write.payload])
        except OSError as error:
            return error
        return None

    def _try_erase(self, erase: _Erase) -> None:
        page = self._page()
        page[:] = bytes(HEADER_BYTES)
        try:
            self._segments.write(erase.slot.slab, erase.slot_bytes, erase.slot.index * erase.slot_bytes, [page])
        except OSError as error:
            logger.warning("slot not erased: %s", error)

    def _flush_segments(self, writes: list[_Write], errors: dict[int, OSError | None]) -> None:
        for number in {write.slot.slab for write in writes if errors[id(write)] is None}:
            try:
                self._segments.sync(number)
            except OSError as error:
                errors.update({id(write): error for write in writes if write.slot.slab == number})

    def _judge(self, errors: list[OSError | None]) -> None:
        """Leave a failing disk alone, each time for twice as long. A full one only can't grow, which is no failure."""
        failed = next((error for error in errors if error is not None and error.errno not in FULL), None)
        if failed is not None:
            pause = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2**self._failures)
            self._failures += 1
            self._retry_at = time.monotonic() + pause
            logger.error("disk write failed, no writes for %.0f s: %s", pause, failed)
        elif errors:
            self._failures = 0

    def _page(self) -> memoryview:
        """This thread's aligned header page."""
        page: memoryview | None = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        return page

    def _read(self, row: Row, slot_bytes: int, into: memoryview, size: int) -> None:
        page = self._page()
        slot = row.slot
        self._segments.read(slot.slab, slot_bytes, slot.index * slot_bytes, [page, into])
        header = SlotHeader.decode(page)
        if header is None:
            raise DataCorruptError(f"slot {slot.index} of segment {slot.slab} has no valid header")
        if (header.identity, header.hash, header.generation) != (row.identity, row.hash, slot.generation):
            raise NotFoundError(f"slot {slot.index} of segment {slot.slab} holds another block")
        if header.checksum != row.checksum or xxh3_128_digest(into[:size]) != header.checksum:
            raise DataCorruptError(f"slot {slot.index} of segment {slot.slab} fails its checksum")


def _tell(group: list[_Operation], errors: dict[int, OSError | None]) -> None:
    """On the loop: pass on what became of a group. A defect of one listener must not keep the others waiting."""
    for operation in group:
        try:
            if isinstance(operation, _Write):
                operation.done(errors[id(operation)])
            elif isinstance(operation, _Barrier):
                operation.done()
        except Exception:
            logger.exception("what was told of a disk operation failed")
