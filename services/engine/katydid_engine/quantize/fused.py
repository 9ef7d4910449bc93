"""Chains of elementwise operations that a GPU runs as one kernel each while a model learns: one by one they take longer
than its products. Torch's Inductor makes the kernels; elsewhere the chains run as they are written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec

import torch
from torch import Tensor

__all__ = ["fused", "fusion"]

_P = ParamSpec("_P")
_SHAPES = 64  # of tensors that one chain meets in a model; Inductor makes a kernel for each
_wanted: ContextVar[bool] = ContextVar("fusion", default=False)


@contextlib.contextmanager
def fusion(device: torch.device | str) -> Iterator[None]:
    """Chains are fused inside; on a CPU nothing changes."""
    if torch.device(device).type != "cuda":
        yield
        return
    before = _wanted.set(True)
    try:
        with torch._dynamo.config.patch(recompile_limit=_SHAPES):
            yield
    finally:
        _wanted.reset(before)


def fused(chain: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """A function of tensors that is one kernel under ``fusion``."""

    @functools.cache
    def compiled() -> Callable[_P, Tensor]:
        return torch.compile(chain, dynamic=False)

    @functools.wraps(chain)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        return (compiled() if _wanted.get() else chain)(*args, **kwargs)

    return call
