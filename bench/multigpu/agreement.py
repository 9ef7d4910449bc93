"""Every plan's logits, draft logits and greedy tokens against those of one rank, hy3-tiny."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from katydid_engine.drafting import DraftModel
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups
from one_rank import Rank
from torch import Tensor

__all__ = ["correct"]

TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"
PROMPT, STEPS = 300, 16


@dataclass(frozen=True, slots=True)
class _Answer:
    """Of a prompt: its logits, the draft layer's, and the likeliest token behind it and behind each that follows."""

    logits: Tensor
    drafted: Tensor
    tokens: list[int]


def correct(own: Rank, plan: ParallelPlan, groups: RankGroups) -> None:
    _compare(own, plan, groups, torch.float32, bar=0.1 if plan.fp8_transfers else 1e-5)
    if not own.dry:
        _compare(own, plan, groups, torch.bfloat16, bar=0.1)


def _compare(own: Rank, plan: ParallelPlan, groups: RankGroups, dtype: torch.dtype, bar: float) -> None:
    options = {"device": own.device, "dtype": dtype}
    whole = _answer(own, load_model(TINY, **options))  # type: ignore[arg-type]
    assert whole is not None
    peers = own.peers(plan, groups, 256, 1024) if dtype == torch.bfloat16 else None
    expert_peers = own.expert_peers(plan, groups, 256) if dtype == torch.bfloat16 else None
    model = load_model(
        TINY,
        plan=plan,
        collectives=groups.tensor,
        experts=groups.experts,
        stage=groups.stage,
        peers=peers,
        expert_peers=expert_peers,
        **options,  # type: ignore[arg-type]
    )
    own.meet()
    found = _answer(own, model, whole.tokens)
    for each in (peers, expert_peers):
        if each is not None:
            each.check()
    if found is None:
        return
    name = str(dtype).removeprefix("torch.")
    for what, some, others in (("logits", found.logits, whole.logits), ("draft logits", found.drafted, whole.drafted)):
        error = float((some - others).norm() / others.norm())
        own.note(f"correct, {plan}: relative error of {what}, {name}", error, "", bar=bar)
    same = sum(a == b for a, b in zip(whole.tokens, found.tokens, strict=True))
    exact = dtype == torch.float32 and not plan.fp8_transfers
    figure = f"correct, {plan}: likeliest tokens equal of {1 + STEPS}, {name}"
    own.note(figure, same, "", 1 + STEPS if exact else None, most=False)


def _answer(own: Rank, model: DecoderLM, given: list[int] | None = None) -> _Answer | None:
    """Goes on with its own likeliest tokens, or with those that are given; None on a pipeline's later stages."""
    ids = torch.randint(3, 4000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    pages, cache = list(range(6)), model.new_kv_cache(6)
    batch = ForwardBatch.pack([TokenRun(ids, 0, pages)], device=own.device)
    hidden = model.forward(batch, cache)
    tokens: list[int] = []
    logits = drafted = hidden
    if model.has_head:
        logits = model.logits(hidden)
        tokens.append(int(logits[-1].argmax()))
        assert isinstance(model, DraftModel)
        follows = torch.tensor([*ids[1:], (given or tokens)[0]], dtype=torch.int32, device=own.device)
        drafted = model.logits(model.draft(batch, hidden, follows, cache))
    model.exchange_rows(1)  # as for steps of decodes: what a graph can hold
    for step in range(STEPS):
        last = TokenRun([(given or tokens)[step]], PROMPT + step, pages)
        hidden = model.forward(ForwardBatch.pack([last], num_decodes=1, device=own.device), cache)
        if model.has_head:
            tokens.append(int(model.logits(hidden).argmax()))
    return _Answer(logits, drafted, tokens) if model.has_head else None
