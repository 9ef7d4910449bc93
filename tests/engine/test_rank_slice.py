"""Any rank of a plan runs alone: its shapes are those of the real plan, its collectives only shape tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from katydid_engine.collectives import SingleRank
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import build_model
from katydid_engine.model_config import ModelConfig, MoeConfig, RopeConfig
from katydid_engine.models.hy_v3 import HyV3
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_slice.absent_ranks import AbsentRanks
from katydid_engine.weights import RandomSource

MOE = MoeConfig(
    num_experts=16,
    top_k=4,
    intermediate_size=32,
    scoring="sigmoid",
    renormalise=True,
    routed_scale=2.826,
    shared_intermediate_size=32,
)
CONFIG = ModelConfig(
    architecture="hy_v3",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_positions=256,
    tie_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    qk_norm=True,
    moe=MOE,
    sparse_layers=(False, True),
    num_mtp_layers=1,
    lm_head_fp32=True,
    bos_token_id=None,
    eos_token_ids=(),
    checkpoint_dtype="bfloat16",
)


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("plan", [ParallelPlan(tp=8), ParallelPlan(tp=8, sp=True, ep=8)])
def test_one_rank_of_eight(plan: ParallelPlan, rank: int) -> None:
    model = build_model(CONFIG, RandomSource(), plan=plan, collectives=AbsentRanks(rank, 8))
    assert isinstance(model, HyV3)
    cache = model.new_kv_cache(4)
    assert cache.k_pages[0].shape == (4, 1, 64, 16)
    batch = ForwardBatch.pack([TokenRun([1], 70, [0, 1]), TokenRun(list(range(50)), 0, [2])], num_decodes=1)
    hidden = model.forward(batch, cache)
    assert hidden.shape == (51, 64)
    assert model.logits(hidden[-2:]).shape == (2, 1000)
    assert model.draft(batch, hidden, batch.token_ids, cache).shape == (51, 64)


def test_single_rank_moves_nothing() -> None:
    group, x = SingleRank(), torch.ones(3)
    assert group.all_reduce(x) is group.all_gather(x, 0) is group.all_to_all(x).wait() is x


def test_fp32_head() -> None:
    """``enable_lm_head_fp32``: bf16 hidden states meet fp32 weights."""
    models = [
        build_model(replace(CONFIG, lm_head_fp32=fp32), RandomSource(), dtype=torch.bfloat16) for fp32 in (True, False)
    ]
    hidden = torch.randn(2, 64).to(torch.bfloat16)
    exact, rounded = (model.logits(hidden) for model in models)
    assert exact.dtype == rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert torch.equal(rounded, rounded.to(torch.bfloat16).float())
