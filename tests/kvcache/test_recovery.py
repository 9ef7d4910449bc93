"""Which rows of a folder are believed at a start, and that generations grow whatever was lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from katydid_cache.layout import BlockLayout
from katydid_kvcache.disk.catalog import Row
from katydid_kvcache.disk.recovery import _newest, lock_folder, open_folder
from katydid_kvcache.disk.slot_header import HEADER_BYTES
from katydid_kvcache.slabs import Slot

from tests.kvcache.inside import durably, opened
from tests.kvcache.running import MIB, run

PAGE = 4096
SLAB = 8 * PAGE
LAYOUT = BlockLayout(layers=1, kv_heads=2, head_dim=16, dtype="float8_e4m3fn")
WIDE = BlockLayout(layers=2, kv_heads=2, head_dim=16, dtype="float8_e4m3fn")
SPACES = {b"s" * 32: LAYOUT, b"w" * 32: WIDE}
SLOT_BYTES = {0: HEADER_BYTES + PAGE, 1: HEADER_BYTES + 2 * PAGE, 2: HEADER_BYTES + PAGE}
FITS = {(b"s" * 32, 0): 4, (b"s" * 32, 2): 4, (b"w" * 32, 1): 2}
"""How many blocks of a namespace a segment holds; those not named here are cut otherwise."""

ROWS = st.lists(
    st.tuples(
        st.sampled_from([b"s" * 32, b"w" * 32, b"unknown".ljust(32)]),
        st.integers(0, 4),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    max_size=14,
)


@given(ROWS, st.randoms())
def test_of_two_rows_with_one_key_or_one_slot_the_later_stays_and_what_can_not_be_is_left_out(rows, chance) -> None:
    made = [
        Row(identity, bytes([name]) * 32, b"", Slot(slab, index, generation), b"sum".ljust(16), 0.0)
        for generation, (identity, name, slab, index) in enumerate(rows, 1)
    ]
    possible = [row for row in made if row.slot.index < FITS.get((row.identity, row.slot.slab), 0)]

    def overtaken(row: Row) -> bool:
        later = [other for other in possible if other.slot.generation > row.slot.generation]
        place = (row.slot.slab, row.slot.index)
        return any(other.key == row.key or (other.slot.slab, other.slot.index) == place for other in later)

    shuffled = made[:]
    chance.shuffle(shuffled)
    assert _newest(shuffled, SPACES, SLOT_BYTES, SLAB) == [row for row in possible if not overtaken(row)]


def test_boot_numbers_grow_though_the_index_is_lost(tmp_path: Path) -> None:
    """A generation begins with the boot number: one used twice would make an old slot look current."""

    async def scenario() -> None:
        for name in range(3):
            async with opened(tmp_path) as (cache, space):
                await durably(cache, space, name)

    run(scenario)
    shutil.rmtree(tmp_path / "index")
    lock = lock_folder(tmp_path)
    folder = open_folder(tmp_path, slabs=8, slab_bytes=MIB, direct=False, map_bytes=16 * MIB, sync=False)
    assert folder.boot == 4
    assert len(folder.rows) == 3
    folder.catalog.close()
    folder.segments.close()
    os.close(lock)
