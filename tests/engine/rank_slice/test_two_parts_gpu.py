"""A rank's chunk in two parts, over a link that is emulated: what goes over it, and that a graph can hold it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.rank_slice.build import SliceOptions, build_slice

pytestmark = pytest.mark.gpu

TOKENS, LAYERS, RANKS = 8192, 2, 8


@pytest.mark.parametrize("plan", ["tp8,sp,ep8,fp8", "tp8,sp,fp8"])
def test_two_parts_send_what_one_would_and_can_be_captured(plan: str) -> None:
    hy3 = KNOWN_MODELS["hy3"]
    config = replace(hy3, num_layers=LAYERS, sparse_layers=(False, True), num_mtp_layers=0)
    made = build_slice(
        SliceOptions(
            config,
            ParallelPlan.parse(plan),
            torch.device("cuda"),
            micro_batches=2,
            most_tokens=TOKENS,
            links=3.9e11,
        )
    )
    link, cache = made.link, made.model.new_kv_cache(TOKENS // 64)
    assert link is not None
    batch = ForwardBatch.pack([TokenRun(made.token_ids(TOKENS), 0, range(TOKENS // 64))], device="cuda")
    made.model.forward(batch, cache)
    link.carried = 0
    hidden = made.model.forward(batch, cache).float()
    assert hidden.isfinite().all()
    # Summands of 7/8 of the rows to their owners, 1/8 of the rows to seven others, with scales; experts of one layer.
    exchanges, told = 2 * LAYERS, 4 * 2 * (config.moe.top_k + ("ep8" not in plan))  # type: ignore[union-attr]
    expected = exchanges * 2 * TOKENS * 7 / RANKS * (config.hidden_size + 4) + TOKENS * 7 / RANKS * told
    assert link.carried == pytest.approx(expected, rel=0.01)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        again = made.model.forward(batch, cache)
        graph.capture_end()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(again.float(), hidden, atol=0.02, rtol=0.02)
