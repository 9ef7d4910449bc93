"""Chains as one kernel make what they make one by one, and so do their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from katydid_engine.quantize import block, distill, learned, pages, rows
from katydid_engine.quantize.fused import fused, fusion
from katydid_engine.quantize.precision import tf32_products
from torch import Tensor

Chain = Callable[..., Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


def cases() -> dict[str, tuple[Chain, list[Tensor], list[Tensor]]]:
    """By name: a chain, what is learned through it, and what is constant. Widths that are no multiple of a block."""
    angle = torch.arange(300.0, device="cuda")[:, None, None] * torch.arange(1, 33, device="cuda") / 40
    scale = torch.full((3,), 0.01, device="cuda")
    return {
        "rows": (rows.e4m3_rows, [drawn(300, 576)], []),
        "norm": (block.rms_norm, [drawn(2, 300, 576), drawn(576)], [torch.tensor(1e-5)]),
        "gated": (block.gated, [drawn(300, 1536), drawn(2, 300, 1536)[1]], []),
        "rotary": (block.rotated, [drawn(2, 300, 9, 64)], [angle.cos(), angle.sin()]),
        "pages": (pages._stored, [drawn(2, 300, 3, 64)], [scale]),
        "int4": (learned._int4, [3 * drawn(192, 576)], [drawn(192, 576)]),
        "e4m3": (learned._e4m3, [20 * drawn(192, 576)], [torch.tensor(0.1, device="cuda"), drawn(192, 1)]),
        "divergence": (distill._divergence, [drawn(2, 100, 1000)], [drawn(3, 100, 1000)[:2]]),
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of Inductor's own import
@pytest.mark.parametrize("name", ["rows", "norm", "gated", "rotary", "pages", "int4", "e4m3", "divergence"])
def test_a_gpu_makes_the_same(name: str) -> None:
    chain, given, constant = cases()[name]

    def work() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in given]
        made = chain(*leaves, *(x if x.is_cuda else float(x) for x in constant))
        made.backward(torch.linspace(-1, 1, made.numel(), device="cuda").view_as(made))  # type: ignore[no-untyped-call]
        return [made.detach(), *(x.grad for x in leaves if x.grad is not None)]

    plain = work()
    with tf32_products("cuda"), fusion("cuda"):
        together = work()
    assert len(plain) == len(together) == 1 + len(given)
    for one, other in zip(plain, together, strict=True):
        # A value that lies on the border of two of e4m3's may go either way: its neighbours differ by an eighth.
        near = torch.isclose(one, other, rtol=1e-4, atol=1e-5)
        assert near.float().mean() > 0.999
        torch.testing.assert_close(one, other, rtol=0.13, atol=1e-3)


def test_a_cpu_runs_the_chain_itself() -> None:
    calls = []

    @fused
    def chain(x: Tensor) -> Tensor:
        calls.append(type(x))
        return x + 1

    with fusion("cpu"):
        assert torch.equal(chain(torch.ones(2)), torch.full((2,), 2.0))
    assert calls == [Tensor]
