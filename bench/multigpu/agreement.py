"""Every plan's logits and greedy tokens against those of one rank, hy3-tiny."""

from __future__ import annotations

from pathlib import Path

import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups
from one_rank import Rank

__all__ = ["correct"]

TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"


def correct(own: Rank, plan: ParallelPlan, groups: RankGroups) -> None:
    _compare(own, plan, groups, torch.float32, bar=0.1 if plan.fp8_transfers else 1e-5)
    if not own.dry:
        _compare(own, plan, groups, torch.bfloat16, bar=0.1)


def _compare(own: Rank, plan: ParallelPlan, groups: RankGroups, dtype: torch.dtype, bar: float) -> None:
    ids = torch.randint(3, 4000, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    pages = list(range(6))

    def run(model: DecoderLM) -> tuple[torch.Tensor, list[int]]:
        cache = model.new_kv_cache(6)
        pack = ForwardBatch.pack
        logits = model.logits(model.forward(pack([TokenRun(ids, 0, pages)], device=own.device), cache))
        tokens = [int(logits[-1].argmax())]
        for step in range(16):
            batch = pack([TokenRun([tokens[-1]], 300 + step, pages)], num_decodes=1, device=own.device)
            tokens.append(int(model.logits(model.forward(batch, cache)).argmax()))
        return logits, tokens

    options = {"device": own.device, "dtype": dtype}
    whole, tokens = run(load_model(TINY, **options))  # type: ignore[arg-type]
    peers = own.peers(plan, groups, 256, 1024) if dtype == torch.bfloat16 else None
    model = load_model(
        TINY,
        plan=plan,
        collectives=groups.tensor,
        experts=groups.experts,
        peers=peers,
        **options,  # type: ignore[arg-type]
    )
    own.meet()
    found, again = run(model)
    if peers is not None:
        peers.check()
    error = float((found - whole).norm() / whole.norm())
    name = str(dtype).removeprefix("torch.")
    own.note(f"correct, {plan}: relative error of logits, {name}", error, "", bar=bar)
    same = sum(a == b for a, b in zip(tokens, again, strict=True))
    exact = dtype == torch.float32 and not plan.fp8_transfers
    own.note(f"correct, {plan}: greedy tokens equal of 17, {name}", same, "", 17 if exact else None, most=False)
