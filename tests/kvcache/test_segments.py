"""Segment files: whole or not there, and never taken for what they are not."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
from katydid_kvcache.disk.segments import SegmentFiles

from tests.kvcache.running import MIB

SLOT = 8192


def page(content: bytes = b"") -> memoryview:
    buffer = mmap.mmap(-1, 4096)
    buffer[: len(content)] = content
    return memoryview(buffer)


@pytest.mark.parametrize("direct", [False, True])
def test_write_and_read(tmp_path: Path, direct: bool) -> None:
    segments = SegmentFiles(tmp_path, MIB, direct=direct)
    segments.write(3, SLOT, 2 * SLOT, [page(b"head"), page(b"body")])
    segments.sync(3)
    head, body = page(), page()
    segments.read(3, SLOT, 2 * SLOT, [head, body])
    assert (bytes(head[:4]), bytes(body[:4])) == (b"head", b"body")
    segments.close()
    again = SegmentFiles(tmp_path, MIB, direct=direct)
    assert again.existing(4) == {3: SLOT}
    again.close()


def test_a_new_slot_size_gets_a_new_file(tmp_path: Path) -> None:
    segments = SegmentFiles(tmp_path, MIB, direct=False)
    segments.write(0, SLOT, 0, [page(b"old")])
    segments.write(0, 2 * SLOT, 0, [page(b"new")])
    assert [path.name for path in tmp_path.iterdir()] == ["00000000-16384.seg"]
    with pytest.raises(OSError, match="8192"):
        segments.read(0, SLOT, 0, [page()])
    segments.close()


def test_files_that_do_not_fit_are_removed(tmp_path: Path) -> None:
    for name, size in (
        ("00000000-8192.seg", MIB),
        ("00000001-8192.seg", MIB - 1),
        ("00000002-99.seg", MIB),
        ("00000009-8192.seg", MIB),
        ("notes.seg", 5),
    ):
        (tmp_path / name).write_bytes(bytes(size))
    segments = SegmentFiles(tmp_path, MIB, direct=False)
    assert segments.existing(9) == {0: SLOT}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000000-8192.seg", "notes.seg"]
    segments.close()


def test_no_room_for_a_segment_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    segments = SegmentFiles(tmp_path, MIB, direct=False)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        segments.write(0, SLOT, 0, [page()])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    segments.write(0, SLOT, 0, [page()])
    segments.close()


def test_a_short_read_is_an_error(tmp_path: Path) -> None:
    segments = SegmentFiles(tmp_path, MIB, direct=False)
    segments.write(0, SLOT, 0, [page()])
    os.truncate(tmp_path / "00000000-8192.seg", 100)
    with pytest.raises(OSError, match="short read"):
        segments.read(0, SLOT, 0, [page()])
    segments.close()
