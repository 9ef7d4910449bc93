"""Products of the GEMM kernels beside cuBLAS: square, Hy3's prefill projections, and few rows with cold weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gemm_timing import (
    BF16,
    BF16_TFLOPS,
    COPY_TB_PER_S,
    E4M3,
    FP8_TFLOPS,
    Row,
    compiling,
    measuring,
    median_us,
    preparing,
    row,
)
from katydid_kernels.gemm.checking import check_gemm
from katydid_kernels.gemm.launch import launch_narrow, launch_wide
from katydid_kernels.gemm.tuning import NarrowTile, narrow_tile, wide_tile

__all__ = ["dense", "few_rows"]

DENSE = {
    "8192^3": (8192, 8192, 8192),
    "16384x10240x4096": (16384, 10240, 4096),
    "4096x4096x8192": (4096, 4096, 8192),
    "16384x3072x4096": (16384, 3072, 4096),
    "512x10240x4096": (512, 10240, 4096),
}
CHECKED_BLOCKS = [(128, 256, 128), (37, 264, 1024), (2049, 4104, 512), (513, 392, 12288)]
CHECKED = [(128, 256, 128), (37, 264, 96), (2049, 4104, 512), (513, 392, 12288), (8192, 520, 1040)]
ROUNDING, SHORT_ACCUMULATOR = 2.2e-3, 5e-3


def dense(kind: str) -> dict[str, Any]:
    """`kind` is bf16, fp8 (the tensor cores' short accumulator), fp8 promoted, or fp8 blocks: scales of blocks."""
    dtype, blocks = BF16 if kind == "bf16" else E4M3, kind == "fp8 blocks"
    promote = kind in ("fp8 promoted", "fp8 blocks")

    def check(shape: tuple[int, int, int], hooks: bool) -> float:
        tile = wide_tile(*shape[:2], promote=promote, blocks=blocks)
        return check_gemm(shape, dtype, tile, promote=promote, hooks=hooks, blocks=blocks)

    shapes = [(shape, False) for shape in (CHECKED_BLOCKS if blocks else CHECKED)]
    shapes += [] if blocks else [((3333, 5000, 1024), True)]
    with compiling():
        for shape, hooks in shapes:
            check(shape, hooks)
    with preparing():
        errors = [check(shape, hooks) for shape, hooks in shapes]
        if max(errors) > (SHORT_ACCUMULATOR if kind == "fp8" else ROUNDING):
            return {"errors": errors, "rows": []}
        for shape in ((512, 10240, 256), (4096, 10240, 256)):
            _dense_row(kind, "warm", shape, dtype, promote)
    rows = []
    for case in DENSE.items():
        with measuring():
            rows.append(_dense_row(kind, *case, dtype, promote))
    return {"errors": errors, "rows": rows}


def _dense_row(kind: str, name: str, shape: tuple[int, int, int], dtype: torch.dtype, promote: bool) -> Row:
    m, n, k = shape
    a, b = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype)
    out, one = torch.empty(m, n, device="cuda", dtype=BF16), torch.full((1,), 0.5, device="cuda")
    hooks = {} if dtype == BF16 else {"row_scale": one, "col_scale": one}
    blocks = kind == "fp8 blocks"
    if blocks:
        hooks = {
            "row_scale": torch.rand(m, k // 128, device="cuda"),
            "col_scale": torch.rand(n // 128, k // 128, device="cuda"),
        }
    tile = wide_tile(m, n, promote=promote, blocks=blocks)
    ours = partial(launch_wide, a, b, out, tile, promote=promote, **hooks)
    if dtype == BF16:
        peer, theirs = "cuBLAS", partial(torch.matmul, a, b.T, out=out)
    else:
        peer = ("cuBLAS, per tensor" if blocks else "cuBLAS") if promote else "cuBLAS, fast accumulation"
        theirs = partial(torch._scaled_mm, a, b.T, one[0], one[0], out_dtype=BF16, use_fast_accum=not promote)
    tera = 2e-6 * m * n * k
    bar = (700.0 if dtype == BF16 else 1200.0) if name == "8192^3" and not blocks else None
    ceiling = BF16_TFLOPS if dtype == BF16 else FP8_TFLOPS
    return row(
        f"{kind} {name}", tera / median_us([ours] * 4), "TFLOP/s", ceiling, bar, peer, tera / median_us([theirs] * 4)
    )


def few_rows() -> dict[str, Any]:
    """fp8 projections of 1, 16 and 64 rows; cuBLAS takes 16 rows or more."""
    with preparing():
        errors = [
            check_gemm(shape, E4M3, _few(shape[0]), promote=True, hooks=True)
            for shape in ((1, 1000, 64), (5, 264, 112), (16, 1000, 1040), (3, 10240, 4096), (63, 4104, 8192))
        ]
        if max(errors) > ROUNDING:
            return {"errors": errors, "rows": []}
        for m in (1, 16, 64):
            _few_row(m, 1280, 1024)
    with measuring():
        shapes = ((1280, 4096), (4096, 1024), (10240, 4096), (4096, 8192))
        return {"errors": errors, "rows": [_few_row(m, n, k) for n, k in shapes for m in (1, 16, 64)]}


def _few(m: int) -> NarrowTile:
    tile = narrow_tile(m)
    assert tile is not None
    return tile


def _few_row(m: int, n: int, k: int) -> Row:
    first = torch.randn(n, k, device="cuda", dtype=BF16).to(E4M3)
    weights = [first] + [first.clone() for _ in range(min(47, max(2, int(130e6 / (n * k)))))]
    a, out = torch.randn(max(m, 16), k, device="cuda").to(E4M3), torch.empty(m, n, device="cuda", dtype=BF16)
    one = torch.full((1,), 0.5, device="cuda")
    ours = partial(launch_narrow, a[:m], out=out, tile=_few(m), row_scale=one, col_scale=one, promote=True)
    us = median_us([partial(ours, w) for w in weights], 10)
    theirs = [partial(torch._scaled_mm, a, w.T, one[0], one[0], out_dtype=BF16) for w in weights]
    floor = (n * k + m * (k + 2 * n)) / COPY_TB_PER_S * 1e-6
    their_us = median_us(theirs, 10)
    return row(f"fp8 {m}x{n}x{k}, cold weights", us, "us", floor, round(their_us, 2), "cuBLAS", their_us)
