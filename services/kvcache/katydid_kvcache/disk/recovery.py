"""What a folder of the disk tier holds when the service starts, and that no other service uses it.

The catalogue tells in milliseconds; when it is missing, unreadable or unfinished, all slot headers are read instead and
the catalogue is made anew. Payloads are not read: every later read checks them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
from katydid_cache.layout import BlockLayout
from katydid_runtime.errors import SettingsError

from katydid_kvcache.blocks import PAGE_BYTES
from katydid_kvcache.disk.catalog import Catalog, Row
from katydid_kvcache.disk.index_probe import index_is_sound
from katydid_kvcache.disk.segments import SegmentFiles
from katydid_kvcache.disk.slot_header import HEADER_BYTES, SlotHeader
from katydid_kvcache.slabs import Slot

__all__ = ["GENERATION_BITS", "DiskFolder", "lock_folder", "open_folder"]

GENERATION_BITS = 40
"""A slot generation is the boot number shifted by so many bits, plus a count: later writes always have larger ones."""

_FORMAT = "katydid-kvcache disk tier, format 2\n"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """An opened folder: its files, its boot number, and the blocks in it, oldest first, by slab."""

    segments: SegmentFiles
    catalog: Catalog
    boot: int
    namespaces: dict[bytes, BlockLayout]
    slot_bytes: dict[int, int]
    rows: list[Row]


def lock_folder(folder: Path) -> int:
    """Make the folder this process's own; the descriptor returned holds the lock until it is closed.

    Raises SettingsError when another service has it, when it can't be written, or when it is of another format.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise SettingsError(
            f"disk_path {folder} can't be used: {error.strerror}", field="disk_path", value=str(folder)
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        format_file = folder / "FORMAT"
        # A start that was cut off may have left it empty.
        if not format_file.exists() or not format_file.stat().st_size:
            format_file.write_text(_FORMAT)
        if (found := format_file.read_text()) != _FORMAT:
            raise SettingsError(
                f"disk_path {folder} has another format",
                field="disk_path",
                value=found.strip(),
                allowed=_FORMAT.strip(),
            )
    except BlockingIOError:
        os.close(lock)
        raise SettingsError(
            f"disk_path {folder} is used by another service", field="disk_path", value=str(folder)
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        os.close(lock)
        raise SettingsError(f"disk_path {folder} can't be used: {error}", field="disk_path") from error
    except SettingsError:
        os.close(lock)
        raise
    return lock


def open_folder(folder: Path, *, slabs: int, slab_bytes: int, direct: bool, map_bytes: int, sync: bool) -> DiskFolder:
    """Open a locked folder and find out what is in it. Raises OSError or lmdb.Error when the disk fails."""
    segments = SegmentFiles(folder / "segments", slab_bytes, direct=direct)
    try:
        slot_bytes = segments.existing(slabs)
        index = folder / "index"
        if (index / "data.mdb").exists() and index_is_sound(index, map_bytes):
            catalog = Catalog(index, map_bytes, sync=sync)
            try:
                if catalog.complete:
                    namespaces, rows = dict(catalog.namespaces()), list(catalog.rows())
                    rows = _newest(rows, namespaces, slot_bytes, slab_bytes)
                    return DiskFolder(segments, catalog, catalog.begin_boot(0), namespaces, slot_bytes, rows)
            except lmdb.CorruptedError as error:
                logger.error("index of the disk tier: %s", error)
            catalog.close()
        shutil.rmtree(index, ignore_errors=True)
        return _rebuilt(segments, Catalog(index, map_bytes, sync=sync), slot_bytes, slab_bytes)
    except BaseException:
        segments.close()
        raise


def _rebuilt(segments: SegmentFiles, catalog: Catalog, slot_bytes: dict[int, int], slab_bytes: int) -> DiskFolder:
    """The folder as its slot headers tell it, with a new catalogue."""
    headers = list(_scan(segments, slot_bytes, slab_bytes))
    newest = max((slot.generation >> GENERATION_BITS for _, slot in headers), default=0)
    namespaces = {header.identity: header.layout for header, _ in headers}
    rows = _newest([Row.of(header, slot) for header, slot in headers], namespaces, slot_bytes, slab_bytes)
    boot = catalog.begin_boot(newest)
    catalog.rebuild(namespaces.items(), rows)
    if slot_bytes:  # a new folder has nothing to rebuild
        logger.warning("index of the disk tier rebuilt from slot headers", extra={"blocks": len(rows)})
    return DiskFolder(segments, catalog, boot, namespaces, slot_bytes, rows)


def _scan(segments: SegmentFiles, slot_bytes: dict[int, int], slab_bytes: int) -> Iterator[tuple[SlotHeader, Slot]]:
    """All slots with a valid header."""
    page = memoryview(mmap.mmap(-1, HEADER_BYTES))
    for number, size in slot_bytes.items():
        for index in range(slab_bytes // size):
            with contextlib.suppress(OSError):
                segments.read(number, size, index * size, [page])
                header = SlotHeader.decode(page)
                if header is not None:
                    yield header, Slot(number, index, header.generation)


def _newest(
    rows: Iterable[Row], namespaces: dict[bytes, BlockLayout], slot_bytes: dict[int, int], slab_bytes: int
) -> list[Row]:
    """The rows that can be true: their segment is there with their slot size, and of two with one key or one slot the
    later generation stays. Oldest first."""
    by_key: dict[bytes, Row] = {}
    by_slot: dict[tuple[int, int], Row] = {}
    fitting = {
        identity: HEADER_BYTES + -(-layout.block_bytes // PAGE_BYTES) * PAGE_BYTES
        for identity, layout in namespaces.items()
    }
    for row in sorted(rows, key=lambda row: row.slot.generation):
        slot = row.slot
        size = slot_bytes.get(slot.slab)
        if size is None or size != fitting.get(row.identity) or slot.index >= slab_bytes // size:
            continue
        older = by_slot.get((slot.slab, slot.index))
        if older is not None and by_key.get(older.key) is older:
            del by_key[older.key]
        by_slot[slot.slab, slot.index] = row
        key = row.key
        by_key.pop(key, None)
        by_key[key] = row
    return list(by_key.values())
