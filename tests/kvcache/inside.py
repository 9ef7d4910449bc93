"""A cache in the test's own process, and what tests do to it: write, read, and flip bytes under it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from katydid_cache.layout import Span
from katydid_cache.records import BlockMissReason, PutOutcome, PutStatus
from katydid_kvcache.blocks import Namespace
from katydid_kvcache.cache import Cache
from katydid_kvcache.policy.lifetimes import Keep, Lifetime
from katydid_kvcache.settings import KvCacheSettings
from katydid_kvcache.store import Refusal
from xxhash import xxh3_128_digest

from tests.kvcache.running import IDENTITY, LAYOUT, MIB

BLOCK = LAYOUT.block_bytes


def payload(name: int, size: int = BLOCK) -> bytes:
    return random.Random(name).randbytes(size)


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


@asynccontextmanager
async def opened(folder: Path | None = None, **options: object) -> AsyncIterator[tuple[Cache, Namespace]]:
    disk = {"disk_path": str(folder), "disk_bytes": 8 * MIB, "index_map_bytes": 16 * MIB} if folder else {}
    given = {"memory_bytes": 2 * MIB, "slab_bytes": MIB} | disk | options
    cache = await Cache.open(KvCacheSettings(**{name: value for name, value in given.items() if value is not None}))
    try:
        yield cache, cache.store.namespace(IDENTITY, LAYOUT)
        cache.store.check_integrity()
    finally:
        await cache.close()


def put(
    cache: Cache,
    space: Namespace,
    name: int,
    *,
    heads: Span = Span(0, 2),
    ttl_s: float | None = None,
    sliding: bool = False,
    tenant: bytes = b"",
) -> PutOutcome:
    """Write block `name` the way the service does it, in this process."""
    begun = cache.store.begin_write(space, key(name), b"", heads, tenant)
    if isinstance(begun, Refusal):
        return PutOutcome(PutStatus.PRESENT if begun.present else PutStatus.REFUSED, begun.refusal)
    view, data = cache.memory.view(begun.block), payload(name)
    sent = b""
    for run in LAYOUT.runs(heads):
        view[run.start : run.stop] = data[run.start : run.stop]
        sent += data[run.start : run.stop]
    return cache.writer.finish(begun, xxh3_128_digest(sent), Keep(None if ttl_s is None else Lifetime(ttl_s, sliding)))


async def durably(cache: Cache, space: Namespace, name: int) -> PutOutcome:
    outcome = put(cache, space, name)
    return await cache.writer.reach_disk(space.blocks[key(name)], outcome)


async def get(cache: Cache, space: Namespace, name: int, mask: int = 3) -> bytes | BlockMissReason:
    reading = await cache.reader.open(space, key(name), mask)
    if isinstance(reading, BlockMissReason):
        return reading
    try:
        return bytes(reading.view)
    finally:
        cache.reader.close(reading)


def flip(folder: Path, slab: int, index: int, at: int) -> None:
    """Flip a byte of a slot: of the header's fields below 296, of the payload above."""
    (segment,) = (folder / "segments").glob(f"{slab:08d}-*.seg")
    position = index * int(segment.stem.partition("-")[2]) + (at if at < 296 else 4096 + at - 296)
    with segment.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
