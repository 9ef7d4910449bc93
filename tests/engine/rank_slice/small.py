"""A small relative of Hy3 whose slices run in milliseconds on a host."""

from __future__ import annotations

from dataclasses import replace

import torch
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.rank_slice.build import RankSlice, SliceOptions, build_slice

HY3 = KNOWN_MODELS["hy3"]
assert HY3.moe is not None
CONFIG = replace(
    HY3,
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=8,
    head_dim=16,
    max_positions=2048,
    sparse_layers=(False, True),
    moe=replace(HY3.moe, num_experts=16, intermediate_size=128, shared_intermediate_size=128, top_k=4),
)


def small_slice(plan: str, rank: int = 0, dtype: str = "fp8", *, mtp: bool = False) -> RankSlice:
    options = SliceOptions(CONFIG, ParallelPlan.parse(plan), torch.device("cpu"), rank=rank, dtype=dtype, mtp=mtp)
    return build_slice(options)
