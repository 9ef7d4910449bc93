"""Measures kv_pack and kv_unpack against their bars: pages of one GPU to and from a registered arena of host memory.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/kv_pack.py --out bench/results

The arena is a memfd, as the cache service's is. First every byte and checksum is compared with the CPU's; then the rate
of blocks of Hy3 in fp8, whole and one of eight heads, beside one large copy by the copy engine in the same run.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gemm_timing import Row, measuring, preparing, row
from katydid_kernels import kv_pack, kv_unpack, linear_checksum, object_bytes, register_memory
from results_file import replace_rows
from torch import Tensor

LAYERS, KV_HEADS, HEAD_DIM, BLOCKS = 81, 8, 128, 48
E4M3 = torch.float8_e4m3fn
OBJECT_BYTES = object_bytes(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=E4M3)
LINK_GB_PER_S = 55.3
Pages = tuple[list[Tensor], list[Tensor]]


def make_arena(slots: int) -> Tensor:
    """uint8 ``[slots, OBJECT_BYTES]`` in a memfd, every page present, registered with CUDA."""
    descriptor = os.memfd_create("katydid-bench-arena")
    os.ftruncate(descriptor, slots * OBJECT_BYTES)
    arena = torch.frombuffer(mmap.mmap(descriptor, slots * OBJECT_BYTES), dtype=torch.uint8).view(slots, OBJECT_BYTES)
    arena.zero_()
    register_memory(arena)
    return arena


def make_pages(heads: int) -> Pages:
    def pages(*shape: int) -> list[Tensor]:
        size = (BLOCKS + 5, heads, *shape)
        return [torch.randint(0, 255, size, dtype=torch.uint8, device="cuda").view(E4M3) for _ in range(LAYERS)]

    return pages(64, HEAD_DIM), pages(HEAD_DIM, 64)


def check(arena: Tensor, page_ids: Tensor, slot_ids: Tensor) -> bool:
    """Two ranks of four heads fill the objects; bytes come back and sums are the CPU's."""
    halves = [make_pages(KV_HEADS // 2) for _ in range(2)]
    sums = torch.zeros(BLOCKS, dtype=torch.int64, device="cuda")
    new_k, new_v = ([torch.zeros_like(p) for p in side] for side in halves[1])
    for rank, pages in enumerate(halves):
        kv_pack(
            *pages, page_ids, arena, slot_ids,
            object_kv_heads=KV_HEADS, first_head=4 * rank, checksums=sums,
        )  # fmt: skip
    arrived = torch.zeros_like(sums)
    first = torch.zeros_like(sums)
    kv_unpack(new_k, new_v, page_ids, arena, slot_ids, object_kv_heads=KV_HEADS, first_head=4, checksums=arrived)
    same = all(
        torch.equal(new[page_ids].view(torch.uint8), old[page_ids].view(torch.uint8))
        for new_side, old_side in zip((new_k, new_v), halves[1], strict=True)
        for new, old in zip(new_side, old_side, strict=True)
    )
    kv_unpack(new_k, new_v, page_ids, arena, slot_ids, object_kv_heads=KV_HEADS, first_head=0, checksums=first)
    expected = [linear_checksum(arena[slot].numpy().tobytes()) for slot in slot_ids[:3].tolist()]
    return (
        same
        and torch.equal(first + arrived, sums)
        and [total % 2**64 for total in sums[:3].tolist()] == expected
    )  # fmt: skip


def gb_per_s(call: Callable[[], object], size: int, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        # The device is busy until all is queued: the time is the move's, not the host's.
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return 1e-6 * size / statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    arguments = parser.parse_args()
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    torch.manual_seed(0)
    arena = make_arena(BLOCKS + 5)
    with preparing():
        page_ids = torch.randperm(BLOCKS + 5, device="cuda")[:BLOCKS].int()
        slot_ids = torch.randperm(BLOCKS + 5, device="cuda")[:BLOCKS].int()
        if not check(arena, page_ids, slot_ids):
            raise SystemExit("bytes or checksums differ")
    rows: list[Row] = []
    with measuring():
        size = BLOCKS * OBJECT_BYTES
        flat = torch.empty(size, dtype=torch.uint8, device="cuda")
        host = arena.view(-1)[:size]
        down = gb_per_s(lambda: host.copy_(flat, non_blocking=True), size)
        up = gb_per_s(lambda: flat.copy_(host, non_blocking=True), size)
        sums = torch.zeros(BLOCKS, dtype=torch.int64, device="cuda")
        for heads in (KV_HEADS, 1):
            pages = make_pages(heads)
            for name, move, bar, peer in (("kv_pack", kv_pack, 50, down), ("kv_unpack", kv_unpack, 45, up)):
                for checksums in (sums, None):
                    call = partial(
                        move, *pages, page_ids, arena, slot_ids, object_kv_heads=KV_HEADS, checksums=checksums
                    )
                    rate = gb_per_s(call, size * heads // KV_HEADS)
                    figure = (
                        f"{name}, {heads} of {KV_HEADS} heads, {'with' if checksums is not None else 'no'} checksum"
                    )
                    found = row(figure, rate, "GB/s", LINK_GB_PER_S, bar, "one copy by the copy engine", peer)
                    print(json.dumps(found), flush=True)
                    rows.append(found)
    replace_rows(arguments.out / "fused.json", rows, "kv_pack.py")


if __name__ == "__main__":
    main()
