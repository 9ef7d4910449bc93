"""Norm and SwiGLU with quantisation, bound by memory: share of the copy bandwidth, inputs rotated past L2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gemm_timing import BF16, COPY_TB_PER_S, measuring, median_us, preparing, row
from katydid_kernels.quantize_rows import (
    add_rms_norm_quantize,
    add_rms_norm_quantize_reference,
    swiglu_quantize,
    swiglu_quantize_reference,
)
from torch import Tensor

__all__ = ["rows"]

HIDDEN = 4096


def rows() -> dict[str, Any]:
    weight = torch.rand(HIDDEN, device="cuda")
    with preparing():
        x, residual = (torch.randn(1000, HIDDEN, device="cuda", dtype=BF16) for _ in range(2))
        pairs = [
            (
                add_rms_norm_quantize(x, residual, weight, 1e-5),
                add_rms_norm_quantize_reference(x, residual, weight, 1e-5),
            ),
            (swiglu_quantize(x), swiglu_quantize_reference(x)),
            (swiglu_quantize(x[:, :384]), swiglu_quantize_reference(x[:, :384])),
        ]
        errors = [_error(found[0], expected[0]) for found, expected in pairs]
        if max(errors) > 1e-3:
            return {"errors": errors, "rows": []}
    with measuring():
        found = []
        for tokens in (8192, 32768):
            xs = [torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16) for _ in range(3)]
            norms = [
                partial(add_rms_norm_quantize, a, b, weight, 1e-5) for a, b in zip(xs, xs[1:] + xs[:1], strict=True)
            ]
            found.append(_row(f"add + RMSNorm + quantise {tokens}x{HIDDEN}", median_us(norms), tokens * HIDDEN * 7))
            us = median_us([partial(swiglu_quantize, a) for a in xs])
            found.append(_row(f"SwiGLU + quantise {tokens}x{HIDDEN // 2}", us, tokens * HIDDEN // 2 * 5))
        # The routed rows of 16,384 tokens at TP8: 131,072 narrow ones.
        narrow = [a.flatten()[: 131072 * 384].view(131072, 384) for a in xs]
        us = median_us([partial(swiglu_quantize, a) for a in narrow])
        found.append(_row("SwiGLU + quantise 131072x192", us, 131072 * 192 * 5))
    return {"errors": errors, "rows": found}


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _row(name: str, us: float, size: int) -> dict[str, Any]:
    return row(f"{name}: share of copy bandwidth", 1e-4 * size / us / COPY_TB_PER_S, "%", 100, 88, None, None)
