"""The LMDB index: what is committed is there after reopening, and damage shows."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_kvcache.disk.catalog import Catalog, Row
from katydid_kvcache.disk.index_probe import index_is_sound
from katydid_kvcache.slabs import Slot

from tests.kvcache.running import LAYOUT, MIB

digests = st.binary(min_size=32, max_size=32)
rows = st.builds(
    Row,
    identity=digests,
    hash=digests,
    parent=st.one_of(st.just(b""), digests.filter(any)),
    slot=st.builds(Slot, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)),
    checksum=st.binary(min_size=16, max_size=16),
    expires_at=st.floats(0, 1e12),
    tenant=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16).filter(any)),
    sliding_s=st.floats(0, 1e9),
)


def row(name: int) -> Row:
    return Row(b"i" * 32, bytes([name]) * 32, b"", Slot(0, name, 100 + name), bytes([name]) * 16, 0.0)


@given(rows)
def test_row_round_trip(example: Row) -> None:
    assert Row.decode(example.key, example.encode()) == example


@given(rows, st.integers(0, 103 * 8))
def test_a_flipped_row_is_no_row(example: Row, bit: int) -> None:
    value = bytearray(example.encode())
    value[bit // 8] ^= 1 << (bit % 8)
    assert Row.decode(example.key, bytes(value)) is None
    key = bytearray(example.key)
    key[bit % 64] ^= 1
    assert Row.decode(bytes(key), example.encode()) is None


def test_changes_are_there_after_reopening(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, 16 * MIB, sync=True)
    assert not catalog.complete
    catalog.rebuild([], [])
    catalog.apply([(b"i" * 32, LAYOUT)], [(row(n).key, row(n).encode()) for n in range(5)])
    catalog.apply([], [(row(2).key, None), (row(3).key, row(4).encode()), (row(3).key, row(3).encode())])
    catalog.close()
    assert index_is_sound(tmp_path, 16 * MIB)
    again = Catalog(tmp_path, 16 * MIB, sync=False)
    assert again.complete
    assert dict(again.namespaces()) == {b"i" * 32: LAYOUT}
    assert list(again.rows()) == [row(n) for n in (0, 1, 3, 4)]
    again.close()


def test_boot_numbers_grow(tmp_path: Path) -> None:
    boots = []
    for at_least in (0, 0, 41, 7):
        catalog = Catalog(tmp_path, 16 * MIB, sync=True)
        boots.append(catalog.begin_boot(at_least))
        catalog.close()
    assert boots == [1, 2, 42, 43]


def test_a_damaged_row_is_told(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, 16 * MIB, sync=True)
    catalog.apply([], [(row(1).key, row(1).encode()[:-1] + b"\0")])
    with pytest.raises(lmdb.CorruptedError):
        list(catalog.rows())
    catalog.close()


@pytest.mark.parametrize("content", [b"", b"noise" * 5000])
def test_a_file_that_is_no_index_is_not_sound(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(content[:-1] if content else content)
    sound = index_is_sound(tmp_path, 16 * MIB)
    # LMDB takes an empty file for a new index, which then counts as unfinished.
    assert sound == (not content)
