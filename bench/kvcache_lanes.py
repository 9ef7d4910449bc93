"""Bulk lanes of the KV-cache service: get by a client, and pulls from instance to instance. Real processes, loopback.

    python bench/kvcache_lanes.py                    # 1 and 2 lanes to a client, 4 and 8 between instances

Medians of `--rounds` rounds in GB/s (1e9 bytes) over new blocks each time, the first round not counted: arenas are
touched and lanes open by then. Checksums are on, as always. `rows` is what `bench/kvcache.py` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvloop
from katydid_cache import BlockLayout, CacheClient, PutBlock, keep_buffers_mapped

LAYOUT = BlockLayout(layers=16, kv_heads=8, head_dim=64, dtype="bfloat16")
IDENTITY = b"bench-lanes".ljust(32, b"\0")
GET_BAR, PULL_BAR = 2.5, 12.0

Row = dict[str, Any]


@contextmanager
def service(*options: str) -> Iterator[str]:
    """A service process with bulk lanes; gives its address."""
    words = ["--listen", "127.0.0.1:0", "--lane-listen", "127.0.0.1:0", "--log-level", "info", *options]
    process = subprocess.Popen([sys.executable, "-m", "katydid_kvcache", *words], stderr=subprocess.PIPE, text=True)
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


def warm(blocks: int) -> list[bytes]:
    return [os.urandom(LAYOUT.block_bytes) for _ in range(blocks)]


async def gets(address: str, lanes: int, blocks: int, rounds: int) -> float:
    """GB/s of a client's get over `lanes` lanes, 0: by stream."""
    payloads, buffers = warm(blocks), [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(blocks)]
    speeds = []
    async with CacheClient(address, name="bench", lanes=lanes) as cache:
        await cache.attach(IDENTITY, LAYOUT)
        for _ in range(rounds + 1):
            hashes = [os.urandom(32) for _ in range(blocks)]
            await cache.put([PutBlock(name, b"", payload) for name, payload in zip(hashes, payloads, strict=True)])
            started = time.perf_counter()
            got = await cache.get(0, b"".join(hashes), into=buffers)
            speeds.append(blocks * LAYOUT.block_bytes / (time.perf_counter() - started) / 1e9)
            if not all(got.found) or any(buffer != sent for buffer, sent in zip(buffers, payloads, strict=True)):
                raise SystemExit(f"wrong answer: {got}")
    return statistics.median(speeds[1:])


async def pulls(source: str, target: str, blocks: int, rounds: int) -> float:
    """GB/s of pulls from the instance at `source` into the one at `target`."""
    payloads, speeds = warm(blocks), []
    async with CacheClient(source, name="bench") as there, CacheClient(target, name="bench") as here:
        await there.attach(IDENTITY, LAYOUT)
        await here.attach(IDENTITY, LAYOUT)
        for _ in range(rounds + 1):
            hashes = [os.urandom(32) for _ in range(blocks)]
            await there.put([PutBlock(name, b"", payload) for name, payload in zip(hashes, payloads, strict=True)])
            started = time.perf_counter()
            result = await here.pulls.pull(source, b"".join(hashes))
            speeds.append(blocks * LAYOUT.block_bytes / (time.perf_counter() - started) / 1e9)
            if result.pulled != blocks:
                raise SystemExit(f"not pulled: {result}")
    return statistics.median(speeds[1:])


async def rows(
    get_lanes: Sequence[int],
    pull_lanes: Sequence[int],
    *,
    get_blocks: int = 64,
    pull_blocks: int = 128,
    rounds: int = 5,
    tell: Callable[[Row], None] = lambda _: None,
) -> list[Row]:
    """One row a case, in the form of bench/results; `tell` hears of each as it comes."""
    memory = ["--memory-bytes", str(1 << 30)]
    cores = len(os.sched_getaffinity(0))
    result: list[Row] = []

    def add(figure: str, speed: float, bar: float | None, **more: int) -> None:
        met = None if bar is None else speed >= bar
        result.append({"figure": figure, "value": round(speed, 2), "unit": "GB/s", "bar": bar, "met": met} | more)
        tell(result[-1])

    with service(*memory) as source:
        for lanes in get_lanes:
            speed = await gets(source, lanes, get_blocks, rounds)
            add(f"get, {lanes} bulk lanes" if lanes else "get, stream", speed, GET_BAR if lanes else None)
        for lanes in pull_lanes:
            with service(*memory, "--pull-from", source, "--lanes", str(lanes)) as target:
                speed = await pulls(source, target, pull_blocks, rounds)
            bar = PULL_BAR if lanes == 8 and cores >= 16 else None
            size = pull_blocks * LAYOUT.block_bytes >> 20
            add(f"instance to instance, {lanes} lanes, {cores} cores", speed, bar, pull_mib=size)
    return result


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--get-lanes", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--pull-lanes", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--pull-blocks", type=int, default=128, help="2 MiB blocks a pull")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(
        f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores, block {LAYOUT.block_bytes >> 20} MiB",
        flush=True,
    )
    await rows(
        options.get_lanes,
        options.pull_lanes,
        pull_blocks=options.pull_blocks,
        rounds=options.rounds,
        tell=lambda row: print(json.dumps(row), flush=True),
    )


if __name__ == "__main__":
    keep_buffers_mapped()
    uvloop.run(main())
