"""The packed int4 weight: where every bit is, by the formulas alone, and what quantising costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kernels.w4a8.packing import (
    CODE_SCALE,
    GROUP,
    Int4Weight,
    dequantize_int4,
    pack_int4,
    quantize_int4,
    unpack_int4,
)


def random_codes(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = -(-shape[-1] // GROUP)
    return torch.randint(-8, 8, shape, dtype=torch.int8), torch.randn(*shape[:-1], groups).bfloat16()


@given(rows=st.integers(1, 200), cols=st.integers(1, 300), lead=st.sampled_from([(), (1,), (2, 3)]))
@settings(max_examples=30, deadline=None)
def test_round_trip(rows: int, cols: int, lead: tuple[int, ...]) -> None:
    codes, scales = random_codes(*lead, rows, cols)
    packed = pack_int4(codes, scales)
    found_codes, found_scales = unpack_int4(packed)
    assert torch.equal(found_codes, codes)
    assert torch.equal(found_scales, scales)


@pytest.mark.parametrize("half", [32, 96, 192])
def test_gate_and_up_round_trip(half: int) -> None:
    codes, scales = random_codes(3, 2 * half, 192)
    packed = pack_int4(codes, scales, gated=True)
    assert all(torch.equal(a, b) for a, b in zip(unpack_int4(packed), (codes, scales), strict=True))


def raised(w: torch.Tensor, half: int) -> tuple[torch.Tensor, int]:
    """The kernels' three instructions a word: bytes of e4m3, and how much too large they are."""
    return (w >> 4 * half & 0x0F0F0F0F) ^ 0x08080808, 8


def signed(w: torch.Tensor, half: int) -> tuple[torch.Tensor, int]:
    """Their nine."""
    sign = w & 0x88888888
    magnitude = (w & 0x77777777 ^ (sign >> 3) * 7) + (sign >> 3)
    low, high = magnitude & 0x0F0F0F0F | sign << 4 & 0xF0F0F0F0, magnitude >> 4 & 0x0F0F0F0F | sign & 0xF0F0F0F0
    return high if half else low, 0


@pytest.mark.parametrize("unpack", [raised, signed])
def test_registers_are_what_wgmma_reads(unpack: Callable[[torch.Tensor, int], tuple[torch.Tensor, int]]) -> None:
    """Every word of a thread, by the formulas of the format, is four e4m3 of the rows and columns wgmma wants."""
    codes, scales = random_codes(128, 192)
    packed = pack_int4(codes, scales)
    words = packed.codes.flatten(1).view(torch.int32).view(2, 3, 4, 32, 4).long() & 0xFFFFFFFF
    lane, j, byte = torch.arange(32)[:, None, None], torch.arange(4)[:, None], torch.arange(4)
    for half in (0, 1):
        registers, offset = unpack(words, half)
        bytes_ = torch.stack([registers >> 8 * b & 0xFF for b in range(4)], -1).to(torch.uint8)
        values = bytes_.view(torch.float8_e4m3fn).float() * CODE_SCALE - offset
        for strip in range(2):
            for unit in range(3):
                for warp in range(4):
                    row = 64 * strip + 16 * warp + 8 * half + lane // 4
                    col = 64 * unit + 16 * j + 4 * (lane % 4) + byte
                    assert torch.equal(values[strip, unit, warp], codes[row, col].float())


def test_scales_stand_by_strip_and_group() -> None:
    codes, scales = random_codes(70, 130)
    packed = pack_int4(codes, scales)
    assert packed.scales.shape == (2, 2, 64)
    assert torch.equal(packed.scales[1, :, :6], scales[64:].T)
    assert not packed.scales[1, :, 6:].any()
    assert packed.nbytes == 2 * (3 * 2048 + 2 * 128)


@pytest.mark.parametrize("clip", ["none", "mse"])
def test_rounding_error(clip: str) -> None:
    weight = torch.randn(4, 64, 320)
    codes, scales = quantize_int4(weight, clip)
    assert codes.dtype == torch.int8
    assert -8 <= codes.min() <= codes.max() <= 7
    error = dequantize_int4(codes, scales) - weight
    # Half a step of a normal group's largest / 7 is uniform: 2.6 / 7 / sqrt(12), and clipping gains a sixth.
    assert error.norm() / weight.norm() < {"none": 0.12, "mse": 0.1}[clip]
    if clip == "none":
        steps = scales.float().abs().repeat_interleave(GROUP, -1)[..., :320]
        assert (error.abs() <= steps * (0.5 + 2**-6)).all()


def test_clipping_never_adds_error() -> None:
    for weight in (torch.randn(8, 128), torch.randn(8, 128).exp(), torch.zeros(8, 128), torch.ones(8, 200)):
        plain, clipped = (dequantize_int4(*quantize_int4(weight, clip)) for clip in ("none", "mse"))
        assert (clipped - weight).norm() <= (plain - weight).norm()


def test_columns_that_count_more_are_rounded_finer() -> None:
    weight, counts = torch.randn(2, 16, 256), torch.ones(2, 256)
    counts[:, ::2] = 100.0
    plain, weighted = (dequantize_int4(*quantize_int4(weight, "mse", some)) for some in (None, counts))
    errors = [(one - weight).square() for one in (plain, weighted)]
    assert errors[1][..., ::2].sum() < errors[0][..., ::2].sum()
    assert (errors[1] * counts[:, None]).sum() < (errors[0] * counts[:, None]).sum()
    same = quantize_int4(weight, "mse", torch.full_like(counts, 3.0))
    assert torch.equal(dequantize_int4(*same), plain)
    nothing = quantize_int4(weight, "mse", torch.zeros_like(counts))
    assert torch.equal(dequantize_int4(*nothing), dequantize_int4(*quantize_int4(weight)))


def test_int4_values_are_kept() -> None:
    codes, _ = random_codes(4, 256)
    codes[:, ::128] = 7
    again, scales = quantize_int4(codes.clamp(-7, 7) * 0.25)
    assert torch.equal(again, codes.clamp(-7, 7))
    assert (scales == 0.25).all()


def test_errors_name_the_field() -> None:
    codes, scales = random_codes(64, 128)
    with pytest.raises(ValueError, match=r"codes must be in -8\.\.7, got .*9"):
        pack_int4(torch.full_like(codes, 9), scales)
    with pytest.raises(ValueError, match="scales must be"):
        pack_int4(codes, scales[:3])
    with pytest.raises(ValueError, match="multiple of 32 rows each, got 48"):
        pack_int4(codes[:48], scales[:48], gated=True)
    with pytest.raises(ValueError, match="clip must be 'none' or 'mse', got 'max'"):
        quantize_int4(torch.ones(1, 1), "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite"):
        quantize_int4(torch.tensor([[float("nan")]]))
    packed = pack_int4(codes, scales)
    with pytest.raises(ValueError, match=r"codes of a \[65, 128\] weight"):
        Int4Weight(packed.codes, packed.scales, 65, 128)
    with pytest.raises(ValueError, match="leading dimensions"):
        Int4Weight(packed.codes[None], packed.scales, 64, 128)
