"""Blocks between a cache service's memory and a GPU's pages, by the way that an engine's rank takes.

    python bench/kvcache_gpu.py                      # 64 blocks of Hy3 in fp8 a step, each direction alone and both

The memory is a memfd as the service shares it, mapped and registered by `SlotMemory`; transfers are those of
`PageMover`, with linear checksums, which are compared with the CPU's. GB/s (1e9 bytes) from the start of a step to the
moment its end is known. "Beside" is what a kernel that reads HBM loses while blocks move, and "layer 0" how soon a step
that waits can begin. Writes rows in the form of bench/results to `--output`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from katydid_cache import ArenaMapping
from katydid_engine.collectives import SingleRank
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.page_mover import PageMover
from katydid_engine.plan import Moved, StepPlan, Transfer
from katydid_engine.slot_memory import SlotMemory
from katydid_engine.staging import arena_slot
from katydid_kernels import linear_checksum, published_checksum

LAYERS, HEADS, HEAD_DIM = 81, 8, 128  # Hy3 with its MTP layer
BLOCK_BYTES = LAYERS * HEADS * 2 * 64 * HEAD_DIM
BAR = 45.0

Row = dict[str, Any]


class Rank:
    """`blocks` pages of Hy3 in fp8, and as many slots in an arena."""

    def __init__(self, blocks: int) -> None:
        device = torch.device("cuda", 0)
        shape = {"num_layers": LAYERS, "num_pages": blocks, "num_kv_heads": HEADS, "head_dim": HEAD_DIM}
        self.cache = KvCache.allocate(**shape, dtype=torch.float8_e4m3fn, device=device)
        for pages in (*self.cache.k_pages, *self.cache.v_pages):
            pages.view(torch.uint8).random_(0, 256)
        model = SimpleNamespace(
            device=device, config=SimpleNamespace(num_kv_heads=HEADS), first_kv_head=0, sums_kv_heads=True
        )
        descriptor = os.memfd_create("bench-arena")
        os.ftruncate(descriptor, 2 * blocks * BLOCK_BYTES)
        self.arena = ArenaMapping(descriptor, 2 * blocks * BLOCK_BYTES)
        self.arena.prefault()
        self.slots = SlotMemory(torch.zeros((2, BLOCK_BYTES), dtype=torch.uint8), device, face=os.getpid())
        self.mover = PageMover(cast("DecoderLM", model), self.cache, SingleRank(), self.slots)
        self.blocks = blocks
        self.step = 0

    def transfers(self, first_slot: int = 0) -> tuple[Transfer, ...]:
        places = range(self.blocks)
        slots = (arena_slot(self.arena.descriptor, (first_slot + n) * BLOCK_BYTES) for n in places)
        return tuple(Transfer(page, slot, summed=True) for page, slot in zip(places, slots, strict=True))

    def start(self, **fields: object) -> StepPlan:
        self.step += 1
        plan = StepPlan(self.step, **fields)  # type: ignore[arg-type]
        self.mover.start(plan)
        return plan

    def move(self, **fields: object) -> list[Moved]:
        plan = self.start(**fields)
        ended: list[Moved] = []
        while self.mover.busy:
            for moved in self.mover.over(plan):
                ended += moved
        return ended


def speed(rank: Rank, moved_bytes: int, rounds: int, **fields: object) -> float:
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        rank.move(**fields)
        seconds.append(time.perf_counter() - started)
    return moved_bytes / statistics.median(seconds[1:]) / 1e9


def beside(rank: Rank, **fields: object) -> tuple[float, float]:
    """GB/s of a kernel that reads HBM, alone and while blocks move."""
    memory = torch.ones(1 << 29, dtype=torch.float32, device="cuda")

    def read(before: Callable[[], object]) -> float:
        start, end = _timed(), _timed()
        torch.cuda.synchronize()
        before()
        start.record()
        for _ in range(6):
            memory.sum()
        end.record()
        torch.cuda.synchronize()
        return float(6 * memory.nbytes / start.elapsed_time(end) / 1e6)

    read(lambda: None)
    alone = read(lambda: None)
    loaded = read(lambda: rank.start(**fields))
    while rank.mover.busy:
        rank.mover.over(StepPlan(rank.step))
    return alone, loaded


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def first_layer(rank: Rank) -> tuple[float, float]:
    """Milliseconds until layer 0 can be read, and the last one."""
    begun, first, last = (_timed() for _ in range(3))
    torch.cuda.synchronize()
    begun.record()
    plan = rank.start(unpacks=rank.transfers(), runs=("one",), waits=True)
    for layer in range(LAYERS):
        rank.cache.layer(layer)
        (first if layer == 0 else last).record()
    rank.mover.over(plan)
    torch.cuda.synchronize()
    return begun.elapsed_time(first), begun.elapsed_time(last)


def rows(blocks: int, rounds: int) -> list[Row]:
    started = time.perf_counter()
    rank = Rank(blocks)
    made_s = time.perf_counter() - started
    size = blocks * BLOCK_BYTES
    told = {"blocks": blocks, "block_mib": round(BLOCK_BYTES / 2**20, 2), "rounds": rounds, "setup_s": round(made_s, 2)}
    (packed,) = rank.move(packs=rank.transfers())
    for block, checksum in enumerate(packed.checksums):
        content = rank.arena.view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        assert checksum == published_checksum(linear_checksum(content)), f"block {block}"
    (unpacked,) = rank.move(unpacks=rank.transfers())
    assert unpacked.checksums == packed.checksums
    result = []

    def add(figure: str, value: float, unit: str, bar: float | None = None, **more: object) -> None:
        met = None if bar is None else value >= bar
        none = {"floor": None, "peer": None, "peer_value": None}
        result.append({"figure": figure, "value": round(value, 2), "unit": unit, **none, "bar": bar, "met": met} | more)
        print(json.dumps(result[-1]), flush=True)

    into = speed(rank, size, rounds, unpacks=rank.transfers())
    add("arena to GPU pages, checksums on, by the engine's mover", into, "GB/s", BAR, **told)
    out = speed(rank, size, rounds, packs=rank.transfers())
    add("GPU pages to arena, checksums on, by the engine's mover", out, "GB/s", BAR, **told)
    both = speed(rank, 2 * size, rounds, packs=rank.transfers(blocks), unpacks=rank.transfers())
    add("both ways at once, sum", both, "GB/s")
    first, last = first_layer(rank)
    add("a step that waits can read layer 0 after", first, "ms", of_last_ms=round(last, 2))
    alone, loaded = beside(rank, unpacks=rank.transfers())
    add("a kernel that reads HBM beside unpacking", loaded, "GB/s", alone=round(alone, 1))
    rank.slots.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    content = {"gpu": torch.cuda.get_device_name(), "rows": rows(options.blocks, options.rounds)}
    if options.output is not None:
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
