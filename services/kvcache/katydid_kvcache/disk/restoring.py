"""Fills a store's index with the blocks that a folder of the disk tier holds, at start."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.disk.recovery import DiskFolder
from katydid_kvcache.store import Store

__all__ = ["restore", "without_collections"]

logger = logging.getLogger(__name__)


@contextmanager
def without_collections() -> Iterator[None]:
    """Makes records by the hundred thousand without the garbage collector looking at all of them again and again.

    Afterwards it looks at them no more: they stay for as long as the service does, and a pass over them takes longer
    than a call may.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def restore(store: Store, folder: DiskFolder) -> None:
    """Bring the blocks of `folder` whose time is not up into `store`, which has a disk tier and no blocks yet."""
    assert store.disk is not None
    for identity, layout in folder.namespaces.items():
        store.namespaces[identity] = Namespace(identity, layout)
    by_slab: dict[int, dict[int, tuple[int, Block]]] = {}
    restored: list[Block] = []
    now = time.time()
    for row in folder.rows:
        if row.expires_at and row.expires_at <= now:
            continue
        block = Block(store.namespaces[row.identity], row.hash, row.parent, row.tenant)
        block.checksum, block.expires_at, block.disk = row.checksum, row.expires_at, row.slot
        block.sliding_s, block.linear = row.sliding_s, row.linear
        by_slab.setdefault(row.slot.slab, {})[row.slot.index] = (row.slot.generation, block)
        restored.append(block)
    for slab, owners in by_slab.items():
        store.disk.slots.restore(slab, folder.slot_bytes[slab], owners)
    for block in restored:
        assert block.disk is not None
        store.restore(block, block.disk)
    logger.info("disk tier ready", extra={"blocks": len(restored), "boot": folder.boot})
