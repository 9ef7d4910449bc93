"""Moves blocks through one KV-cache service, one pass for each line on standard input: `python bench/kvcache_pass.py`.

A pass is 128 new blocks of 2 MiB, put and then got: in place 8 a call with four calls in flight, in streams all in one
call. What came back is compared at its end. Prints a JSON object a pass: GB/s (1e9 bytes) of put and get, and of plain
copies of the same buffers into and out of shared memory of the same kind, made right before and after. The programs of
peers in `kvcache_peers` do the same.

`--unchecked` leaves out every xxh3-128 on both sides, which no service can be told to do: to see what they cost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

import uvloop

BLOCKS, BATCH, CALLS = 128, 8, 4


# Not zero, which would give a slot up.
_SAME = b"\1" * 16


class _NoHash:
    """Stands for xxhash.xxh3_128."""

    def update(self, _data: object) -> None:
        pass

    def digest(self) -> bytes:
        return _SAME


def without_checksums() -> None:
    """Every xxh3-128 of this process is the same from now on; to be called before katydid is imported."""
    import xxhash

    vars(xxhash).update(xxh3_128=_NoHash, xxh3_128_digest=lambda _data: _SAME)


async def batches(work: Callable[[range], Awaitable[None]], size: int) -> float:
    """Seconds for all blocks, `size` a call, `CALLS` calls in flight."""
    waiting = iter(range(0, BLOCKS, size))

    async def caller() -> None:
        for first in waiting:
            await work(range(first, first + size))

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLS)))
    return time.perf_counter() - started


class Copies:
    """Plain copies between private buffers and shared memory larger than any cache of the processor."""

    def __init__(self, block_bytes: int) -> None:
        import mmap

        import numpy as np

        self._numpy = np
        self._bytes = 2 * BLOCKS * block_bytes
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, self._bytes)
        self._shared = np.frombuffer(mmap.mmap(descriptor, self._bytes), dtype=np.uint8)
        self._shared[::4096] = 1
        self._places = itertools.cycle(range(0, self._bytes, block_bytes))

    def speed(self, buffers: list[memoryview], *, into_shared: bool) -> float:
        """GB/s of one pass over the buffers."""
        np, places = self._numpy, self._views(len(buffers[0]))
        privates = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
        started = time.perf_counter()
        for private, place in zip(privates, places, strict=False):
            np.copyto(*((place, private) if into_shared else (private, place)))
        return sum(map(len, buffers)) / (time.perf_counter() - started) / 1e9

    def _views(self, size: int) -> Iterator[object]:
        for place in self._places:
            yield self._shared[place : place + size]


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("address")
    parser.add_argument("--arena", action="store_true", help="in place, not in streams")
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--lanes", type=int, default=0, help="bulk lanes of a get, from a service that has them")
    parser.add_argument("--put-only", action="store_true", help="to load a service: put for three seconds")
    options = parser.parse_args()
    if options.unchecked:
        without_checksums()
    from katydid_cache import BlockLayout, CacheClient, PutBlock, PutStatus, keep_buffers_mapped

    keep_buffers_mapped()
    layout = BlockLayout(layers=16, kv_heads=8, head_dim=64, dtype="bfloat16")
    payloads = [memoryview(bytearray(os.urandom(layout.block_bytes))) for _ in range(BLOCKS)]
    buffers = [memoryview(bytearray(layout.block_bytes)) for _ in range(BLOCKS)]
    copies = Copies(layout.block_bytes)
    async with CacheClient(options.address, name="bench", lanes=options.lanes) as cache:
        await cache.attach(b"bench".ljust(32, b"\0"), layout, arena=options.arena)

        async def one_pass() -> tuple[float, float]:
            hashes = [os.urandom(32) for _ in range(BLOCKS)]

            async def put(part: range) -> None:
                outcomes = await cache.put([PutBlock(hashes[index], b"", payloads[index]) for index in part])
                if any(outcome.status is not PutStatus.STORED for outcome in outcomes):
                    raise SystemExit(f"not stored: {outcomes}")

            async def get(part: range) -> None:
                chain = b"".join(hashes[part.start : part.stop])
                found = await cache.lookup(chain)
                result = await cache.get(found.lease, chain, into=buffers[part.start : part.stop])
                if not all(result.found):
                    raise SystemExit(f"not found: {result}")
                await cache.release(found.lease)

            size = BATCH if options.arena else BLOCKS
            return await batches(put, size), await batches(get, size)

        async def load() -> float:
            puts = []
            until = time.perf_counter() + 3.0
            while time.perf_counter() < until:
                blocks = [PutBlock(os.urandom(32), b"", payload) for payload in payloads]
                started = time.perf_counter()
                await cache.put(blocks)
                puts.append(time.perf_counter() - started)
            return statistics.median(puts)

        print("ready", flush=True)
        gigabytes = BLOCKS * layout.block_bytes / 1e9
        while await asyncio.to_thread(sys.stdin.readline):
            if options.put_only:
                print(json.dumps({"put": gigabytes / await load()}), flush=True)
                continue
            copy_in = [copies.speed(payloads, into_shared=True)]
            copy_out = [copies.speed(buffers, into_shared=False)]
            times = [await one_pass() for _ in range(3)]
            if buffers != payloads:
                raise SystemExit("what came back is not what was put")
            copy_in.append(copies.speed(payloads, into_shared=True))
            copy_out.append(copies.speed(buffers, into_shared=False))
            result = {
                "put": gigabytes / statistics.median(put_s for put_s, _ in times),
                "get": gigabytes / statistics.median(get_s for _, get_s in times),
                "copy_in": statistics.mean(copy_in),
                "copy_out": statistics.mean(copy_out),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
