"""Throughput of the KV-cache service over loopback: a real service process, put and get through its client.

    python bench/kvcache.py                       # 2 MiB blocks, memory tier
    python bench/kvcache.py --disk /path          # also durable puts, and gets of blocks that are on disk alone

Prints the median of `--rounds` rounds in GB/s (1e9 bytes), memcpy's own speed in the same run, and the latency of a
Lookup with a lease over 4,096 blocks. Pools are warm on both sides: the first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from katydid_cache import BlockLayout, CacheAdmin, CacheClient, Durability, PutBlock, PutStatus, keep_buffers_mapped
from xxhash import xxh3_128_digest

LAYOUT = BlockLayout(layers=16, kv_heads=8, head_dim=64, dtype="bfloat16")
IDENTITY = b"bench".ljust(32, b"\0")
LOOKUP_BLOCKS = 4096
BATCH = 8


@contextmanager
def service(*options: str, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """A service process; gives its address."""
    command = [sys.executable, "-m", "katydid_kvcache", "--listen", listen, "--log-level", "info", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "READY" in line:
                yield json.loads(line)["address"]
                return
        raise SystemExit("the service did not start")
    finally:
        process.terminate()
        process.communicate()


async def transfer(cache: CacheClient, blocks: int, rounds: int, durability: Durability) -> tuple[float, float]:
    """Median GB/s of put and of get, `blocks` new blocks a round."""
    payloads = [os.urandom(LAYOUT.block_bytes) for _ in range(blocks)]
    buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(blocks)]
    puts, gets = [], []
    for number in range(rounds + 1):
        hashes = [os.urandom(32) for _ in range(blocks)]
        batch = [PutBlock(block_hash, b"", payload) for block_hash, payload in zip(hashes, payloads, strict=True)]
        started = time.perf_counter()
        outcomes = await cache.put(batch, durability=durability)
        put_s = time.perf_counter() - started
        if any(outcome.status is not PutStatus.STORED for outcome in outcomes):
            raise SystemExit(f"not stored: {outcomes}")
        started = time.perf_counter()
        result = await cache.get(0, b"".join(hashes), into=buffers)
        get_s = time.perf_counter() - started
        if not all(result.found) or any(bytes(got) != sent for got, sent in zip(buffers, payloads, strict=True)):
            raise SystemExit(f"wrong answer: {result}")
        if number:
            puts.append(blocks * LAYOUT.block_bytes / put_s / 1e9)
            gets.append(blocks * LAYOUT.block_bytes / get_s / 1e9)
    return statistics.median(puts), statistics.median(gets)


async def lookups(address: str, count: int = 50) -> tuple[float, float]:
    """Median and worst milliseconds of a Lookup + lease + Release of a chain of 4,096 small blocks."""
    small = BlockLayout(layers=1, kv_heads=1, head_dim=16, dtype="float8_e4m3fn")
    hashes = [os.urandom(32) for _ in range(LOOKUP_BLOCKS)]
    times = []
    async with CacheClient(address, name="bench-lookup") as cache:
        await cache.attach(b"lookup".ljust(32, b"\0"), small)
        payload = os.urandom(small.block_bytes)
        await cache.put([PutBlock(block_hash, b"", payload) for block_hash in hashes])
        chain = b"".join(hashes)
        for _ in range(count):
            started = time.perf_counter()
            found = await cache.lookup(chain)
            times.append(1e3 * (time.perf_counter() - started))
            if found.blocks != LOOKUP_BLOCKS:
                raise SystemExit(f"found {found.blocks} of {LOOKUP_BLOCKS}")
            await cache.release(found.lease)
    return statistics.median(times), max(times)


async def shared_memory(address: str, rounds: int, *, checked: bool) -> tuple[float, float]:
    """Median GB/s of put and get in place, `BATCH` blocks a call, with a copy from and to private memory.

    Not `checked` leaves out what the client hashes; the service always checks what it commits.
    """
    payloads = [os.urandom(LAYOUT.block_bytes) for _ in range(BATCH)]
    sums = [xxh3_128_digest(payload) for payload in payloads]
    buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(BATCH)]
    puts, gets = [], []
    async with CacheClient(address, name="bench-arena") as cache:
        await cache.attach(IDENTITY, LAYOUT, arena=True)
        arena = cache.in_place
        for _ in range(rounds):
            hashes = os.urandom(32 * BATCH)
            started = time.perf_counter()
            reservation = await arena.reserve(hashes)
            checksums = []
            for slot, payload, known in zip(reservation.slots, payloads, sums, strict=True):
                if slot is None:
                    raise SystemExit("no slot")
                view = arena.view(slot)
                view[:] = payload
                checksums.append(xxh3_128_digest(view) if checked else known)
            await arena.commit(reservation, checksums)
            put_s = time.perf_counter() - started
            started = time.perf_counter()
            found = await cache.lookup(hashes)
            for slot, buffer in zip(found.slots, buffers, strict=True):
                buffer[:] = arena.view(slot)
                if checked and xxh3_128_digest(buffer) != slot.checksum:
                    raise SystemExit("wrong bytes")
            await cache.release(found.lease)
            get_s = time.perf_counter() - started
            puts.append(BATCH * LAYOUT.block_bytes / put_s / 1e9)
            gets.append(BATCH * LAYOUT.block_bytes / get_s / 1e9)
    return statistics.median(puts), statistics.median(gets)


async def cold_reads(address: str, blocks: int, cache: CacheClient) -> float:
    """GB/s of a get whose blocks are on disk alone: written, then pushed out of memory by others."""
    hashes = [os.urandom(32) for _ in range(blocks)]
    payload = os.urandom(LAYOUT.block_bytes)
    await cache.put([PutBlock(block_hash, b"", payload) for block_hash in hashes], durability=Durability.DISK)
    stats = await cache.stats()
    memory_blocks = stats.tiers[next(iter(stats.tiers))].capacity_bytes // LAYOUT.block_bytes
    for _ in range(-(-memory_blocks // blocks)):
        fill = [PutBlock(os.urandom(32), b"", payload) for _ in range(blocks)]
        await cache.put(fill)
    async with CacheAdmin(address) as admin:
        await admin.flush()
    buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(blocks)]
    started = time.perf_counter()
    result = await cache.get(0, b"".join(hashes), into=buffers)
    elapsed_s = time.perf_counter() - started
    if not all(result.found):
        raise SystemExit(f"wrong answer: {result}")
    return blocks * LAYOUT.block_bytes / elapsed_s / 1e9


def memcpy_speed() -> float:
    source, target = bytearray(os.urandom(64 << 20)), bytearray(64 << 20)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        memoryview(target)[:] = source
        times.append(time.perf_counter() - started)
    return len(source) / statistics.median(times) / 1e9


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=64, help="2 MiB blocks a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-bytes", type=int, default=512 << 20)
    parser.add_argument("--disk", type=Path, help="folder for a disk tier")
    options = parser.parse_args()
    flags = ["--memory-bytes", str(options.memory_bytes)]
    if options.disk is not None:
        flags += ["--disk-path", str(options.disk), "--disk-bytes", str(4 << 30)]
    print(f"load {os.getloadavg()[0]:.1f}, memcpy {memcpy_speed():.1f} GB/s, block {LAYOUT.block_bytes >> 20} MiB")
    with service(*flags) as address:
        async with CacheClient(address, name="bench") as cache:
            await cache.attach(IDENTITY, LAYOUT)
            put, get = await transfer(cache, options.blocks, options.rounds, Durability.MEMORY)
            print(f"memory tier       put {put:5.2f} GB/s   get {get:5.2f} GB/s")
            if options.disk is not None:
                put, _ = await transfer(cache, options.blocks, options.rounds, Durability.DISK)
                print(
                    f"durable           put {put:5.2f} GB/s   get {await cold_reads(address, 32, cache):5.2f} GB/s cold"
                )
        median_ms, worst_ms = await lookups(address)
        print(f"lookup + lease of {LOOKUP_BLOCKS} blocks   median {median_ms:.2f} ms   worst {worst_ms:.2f} ms")
    with (
        tempfile.TemporaryDirectory() as folder,
        service("--memory-bytes", str(options.memory_bytes), listen=f"unix:{folder}/cache.sock") as address,
    ):
        for checked in (True, False):
            put, get = await shared_memory(address, 20 * options.rounds, checked=checked)
            told = "on " if checked else "off"
            print(f"in place, {BATCH} a call, checksums {told}   put {put:5.2f} GB/s   get {get:5.2f} GB/s")


if __name__ == "__main__":
    keep_buffers_mapped()
    uvloop.run(main())
