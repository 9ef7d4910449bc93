"""Phases of a timeline by the order of its kernels; the floor of the same step."""

from __future__ import annotations

import pytest
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.rank_slice.floor import Ceilings, floor_s, step_work
from katydid_engine.rank_slice.phases import KernelSpan, phase_times

HY3 = KNOWN_MODELS["hy3"]
LAYER = (
    ("_add_rms_norm_quantize_kernel", "norms"),
    ("narrow_gemm_kernel", "qkv"),
    ("qkv_post_kernel", "qkv post"),
    ("decode_hopper_kernel", "attention"),
    ("_quantize_fp8_kernel", "output projection"),
    ("narrow_gemm_kernel", "output projection"),
)
FEW_ROWS = (
    ("_add_rms_norm_quantize_kernel", "norms"),
    ("_linear_few_kernel", "qkv"),
    ("qkv_post_kernel", "qkv post"),
    ("decode_hopper_kernel", "attention"),
    ("_linear_few_kernel", "output projection"),
    ("_add_rms_norm_quantize_kernel", "norms"),
    ("_linear_few_kernel", "dense layers"),
    ("_swiglu_quantize_kernel", "dense layers"),
    ("_linear_few_kernel", "dense layers"),
)
DENSE = (
    ("_add_rms_norm_quantize_kernel", "norms"),
    ("narrow_gemm_kernel", "dense layers"),
    ("_swiglu_quantize_kernel", "dense layers"),
    ("narrow_gemm_kernel", "dense layers"),
)
SPARSE = (
    ("normed_router_kernel", "router"),
    ("wide_gemm_kernel", "shared expert"),
    ("_swiglu_quantize_kernel", "shared expert"),
    ("wide_gemm_kernel", "shared expert"),
    ("_place_many_kernel", "experts"),
    ("experts_up_kernel", "experts"),
    ("wide_gemm_kernel", "experts"),
    ("_combine_kernel", "experts"),
)
DISPATCHED = (
    ("normed_router_kernel", "router"),
    ("_route_kernel", "exchange"),
    ("_scatter_kernel", "exchange"),
    ("narrow_gemm_kernel", "shared expert"),
    ("_swiglu_quantize_kernel", "shared expert"),
    ("narrow_gemm_kernel", "shared expert"),
    ("_split_kernel", "exchange"),
    ("experts_decode_kernel", "experts"),
    ("_gather_kernel", "exchange"),
)
SPLIT = (
    ("two_shot_kernel", "exchange"),
    *LAYER[1:],
    ("two_shot_kernel", "exchange"),
    ("wide_gemm_kernel", "dense layers"),
    ("two_shot_kernel", "exchange"),
    *LAYER[1:],
    ("two_shot_kernel", "exchange"),
    *SPARSE,
)
STEP = (
    ("Memcpy HtoD (Pinned -> Device)", "other"),
    ("_decode_plan_kernel", "attention"),
    *LAYER,
    *DENSE,
    *FEW_ROWS,
    *LAYER,
    *SPARSE,
    *LAYER,
    *DISPATCHED,
    *SPLIT,
    ("_rms_norm_kernel", "norms"),
    ("sm90_xmma_gemm_f32f32", "lm head"),
    ("choose_kernel", "sampling"),
)


def test_every_kernel_in_its_phase() -> None:
    """Each alone: of equal kernels in a row, only one has a time."""
    for index, (_, phase) in enumerate(STEP):
        spans = [KernelSpan(name, at, 2.0 if at == index else 0.0) for at, (name, _) in enumerate(STEP)]
        times = phase_times(spans)
        assert times.seconds[phase] == pytest.approx(2e-6), STEP[index]
        assert sum(times.launches.values()) == len(STEP)


def test_phases_and_gaps_add_up_to_the_span() -> None:
    spans = [
        KernelSpan("qkv_post_kernel", 0.0, 10.0),
        KernelSpan("decode_hopper_kernel", 8.0, 4.0),
        KernelSpan("narrow_gemm_kernel", 20.0, 5.0),
        KernelSpan("memcpy", 21.0, 1.0),
    ]
    times = phase_times(spans)
    found = {phase: round(seconds * 1e6, 6) for phase, seconds in times.seconds.items() if seconds}
    assert found == {"qkv post": 10, "attention": 2, "gaps": 8, "output projection": 5}
    assert times.span == pytest.approx(25e-6)
    assert times.others == ("memcpy",)
    assert phase_times([]).span == 0


@pytest.mark.parametrize(("batch", "milliseconds"), [(16, 4.5), (64, 9.3)])
def test_floor_of_a_step(batch: int, milliseconds: float) -> None:
    """As counted by hand: weights of the experts that are hit, of everything else, and 4K tokens a request."""
    work = step_work(
        HY3, ParallelPlan(tp=8), dtype="fp8", kv="fp8", tokens=batch, pairs=batch * 4096,
        context_tokens=batch * 4096, sampled=batch,
    )  # fmt: skip
    assert floor_s(work) == pytest.approx(milliseconds / 1e3, rel=0.08)


def test_floor_of_a_prompt_is_that_of_its_products() -> None:
    tokens = 32768
    work = step_work(
        HY3, ParallelPlan(tp=8), dtype="fp8", kv="fp8", tokens=tokens, pairs=tokens**2 / 2,
        context_tokens=tokens, sampled=1,
    )  # fmt: skip
    flop = {part.phase: part.flop for part in work}
    assert flop["attention"] == 80 * 4 * 1024 * tokens**2 / 2
    assert flop["experts"] == 79 * 6 * tokens * 8 * 4096 * 192
    assert floor_s(work) > sum(flop.values()) / Ceilings().fp8
    split = step_work(
        HY3, ParallelPlan.parse("tp8,sp"), dtype="fp8", kv="fp8", tokens=tokens, pairs=tokens**2 / 2,
        context_tokens=tokens, sampled=1,
    )  # fmt: skip
    rows = {part.phase: part.moved for part in work if part.phase == "norms"}["norms"]
    assert next(part.moved for part in split if part.phase == "norms") == rows / 8
