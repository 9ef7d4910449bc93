"""The figures of `bench/kvcache.py` that are not about moving blocks in memory, each a function of its own."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from katydid_cache import BlockLayout, CacheClient, Durability, PutBlock, PutStatus
from katydid_runtime.block_hash import ChainKey
from kvcache_services import HERE, Passes, service

__all__ = ["disk", "hashing", "lookups", "restart"]

LAYOUT = BlockLayout(layers=16, kv_heads=8, head_dim=64, dtype="bfloat16")
SMALL = BlockLayout(layers=1, kv_heads=1, head_dim=16, dtype="float8_e4m3fn")
IDENTITY = b"bench-cases".ljust(32, b"\0")
LOOKUP_BLOCKS = 4096
DISK_BLOCKS = 512
RESTART_BLOCKS = 100_000
MIB = 1 << 20


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def lookups(load_options: Sequence[str] | None, count: int = 500) -> dict[str, float]:
    """Milliseconds of Lookup with a lease over 4,096 blocks, while another client puts all it can; None: alone."""
    times: list[float] = []
    puts: list[float] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = ("--memory-bytes", str(768 * MIB))
        address, _ = stack.enter_context(service(*options, listen=f"unix:{folder}/cache.sock"))
        async with CacheClient(address, name="bench-lookups") as cache:
            await cache.attach(IDENTITY, SMALL, arena=True)
            hashes = [os.urandom(32) for _ in range(LOOKUP_BLOCKS)]
            payload = os.urandom(SMALL.block_bytes)
            await cache.put([PutBlock(block_hash, b"", payload) for block_hash in hashes])
            chain = b"".join(hashes)
            loading = None
            if load_options is not None:
                program = str(HERE / "kvcache_pass.py")
                load = Passes(stack, sys.executable, program, address, "--put-only", *load_options)
                loading = asyncio.create_task(asyncio.to_thread(load.next))
                await asyncio.sleep(1.0)
            for _ in range(count):
                started = time.perf_counter()
                found = await cache.lookup(chain)
                times.append(1e3 * (time.perf_counter() - started))
                if found.blocks != LOOKUP_BLOCKS:
                    raise SystemExit(f"found {found.blocks} of {LOOKUP_BLOCKS}")
                await cache.release(found.lease)
                await asyncio.sleep(0.005)
                if loading is not None and loading.done():
                    puts.append(loading.result()["put"])
                    loading = asyncio.create_task(asyncio.to_thread(load.next))
            if loading is not None:
                puts.append((await loading)["put"])
    return {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99), "put": statistics.median(puts or [0.0])}


def hashing() -> float:
    """Milliseconds to hash 131,072 tokens into the chain, median of 50."""
    key = ChainKey(bytes(32), salt=bytes(32), public_blocks=16)
    ids = array("I", range(131_072)).tobytes()
    times = []
    for _ in range(50):
        started = time.perf_counter()
        key.extend(ids)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def _fio(folder: Path, *options: str) -> float | None:
    """GB/s of fio with the service's block size, threads and direct I/O; None where there is no fio."""
    words = ["fio", "--name=bench", "--bs=2M", "--direct=1", "--ioengine=psync", "--numjobs=4", "--thread"]
    words += ["--group_reporting", "--size=256M", f"--directory={folder}", "--output-format=json", *options]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return None
    job = json.loads(ran.stdout)["jobs"][0]
    return float(max(job["read"]["bw_bytes"], job["write"]["bw_bytes"])) / 1e9


async def disk(parent: Path) -> tuple[dict[str, float], dict[str, float | None]]:
    """GB/s of durable writes and of cold reads into memory, 2 MiB blocks, and of fio beside them on the same disk."""
    gigabytes = DISK_BLOCKS * LAYOUT.block_bytes / 1e9
    hashes = [os.urandom(32) for _ in range(DISK_BLOCKS)]
    payload = os.urandom(LAYOUT.block_bytes)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        _fio(folder, "--rw=write")
        fio_write = _fio(folder, "--rw=write", "--end_fsync=1")
        options = ("--memory-bytes", str(1280 * MIB), "--disk-path", f"{folder}/tier", "--disk-bytes", str(1280 * MIB))
        listen = f"unix:{folder}/cache.sock"
        with service(*options, listen=listen) as (address, _):
            async with CacheClient(address, name="bench-disk") as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                await asyncio.sleep(3.0)
                # Segment files are made once in a lifetime: the last round writes where blocks were before.
                for number in range(3):
                    if number:
                        hashes = [os.urandom(32) for _ in range(DISK_BLOCKS)]
                    blocks = [PutBlock(block_hash, b"", payload) for block_hash in hashes]
                    started = time.perf_counter()
                    outcomes = await cache.put(blocks, durability=Durability.DISK, timeout_s=120)
                    write_s = time.perf_counter() - started
                    if any(outcome.status is not PutStatus.STORED for outcome in outcomes):
                        raise SystemExit(f"not stored: {set(outcomes)}")
        fio_read = _fio(folder, "--rw=read")
        with service(*options, listen=listen) as (address, _):
            async with CacheClient(address, name="bench-disk") as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                await asyncio.sleep(3.0)
                started = time.perf_counter()
                fetched = await cache.prefetch(b"".join(hashes), deadline_s=60, wait=True)
                read_s = time.perf_counter() - started
                if fetched.blocks != DISK_BLOCKS:
                    raise SystemExit(f"read {fetched.blocks} of {DISK_BLOCKS}")
    return {"write": gigabytes / write_s, "read": gigabytes / read_s}, {"write": fio_write, "read": fio_read}


async def restart(parent: Path) -> dict[str, float]:
    """Seconds from the start of the process over 100,000 blocks on disk to READY, and to the first block read."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        options = (
            *("--memory-bytes", str(1024 * MIB), "--disk-bytes", str(1536 * MIB), "--disk-path", f"{name}/tier"),
            *("--no-disk-sync", "--disk-queue-bytes", str(1024 * MIB)),
        )
        listen = f"unix:{name}/cache.sock"
        payload = os.urandom(SMALL.block_bytes)
        last: list[bytes] = []
        with service(*options, listen=listen) as (address, _):
            async with CacheClient(address, name="bench-restart") as cache:
                await cache.attach(IDENTITY, SMALL, arena=True)
                for _ in range(0, RESTART_BLOCKS, 2000):
                    last = [os.urandom(32) for _ in range(2000)]
                    blocks = [PutBlock(block_hash, b"", payload) for block_hash in last]
                    outcomes = await cache.put(blocks, durability=Durability.DISK, timeout_s=60)
                    if any(outcome.status is not PutStatus.STORED for outcome in outcomes):
                        raise SystemExit("not stored")
        started = time.perf_counter()
        with service(*options, listen=listen) as (address, _):
            ready_s = time.perf_counter() - started
            async with CacheClient(address, name="bench-restart") as cache:
                await cache.attach(IDENTITY, SMALL, arena=True)
                found = await cache.lookup(b"".join(last))
                into = [memoryview(bytearray(SMALL.block_bytes))]
                result = await cache.get(found.lease, last[-1], into=into)
                if found.blocks != len(last) or not result.prefix or into[0] != payload:
                    raise SystemExit(f"found {found.blocks} blocks after the restart")
                hit_s = time.perf_counter() - started
                held = max(tier.blocks for tier in (await cache.stats()).tiers.values())
                if held < RESTART_BLOCKS:
                    raise SystemExit(f"{held} blocks after the restart")
    return {"ready_s": ready_s, "hit_s": hit_s}
