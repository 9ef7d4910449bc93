"""A chunk of a split residual in two parts that take turns: logits against one rank's, and time against one part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups
from one_rank import Rank
from shares import build_share, cut_hy3

__all__ = ["halves"]

TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"
TINY_TOKENS, TINY_HIDDEN = 300, 256
REPEATS = 5


def halves(own: Rank, plan: ParallelPlan, groups: RankGroups, tokens: int) -> None:
    _right(own, plan, groups)
    _timed(own, plan, groups, tokens)


def _right(own: Rank, plan: ParallelPlan, groups: RankGroups) -> None:
    ids = torch.randint(3, 4000, (TINY_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(model: DecoderLM) -> torch.Tensor:
        batch = ForwardBatch.pack([TokenRun(ids, 0, range(5))], device=own.device)
        return model.logits(model.forward(batch, model.new_kv_cache(5)))

    options = {"device": own.device, "dtype": torch.float32 if own.dry else torch.bfloat16}
    whole = logits(load_model(TINY, **options))  # type: ignore[arg-type]
    for parts in (1, 2):
        model = load_model(
            TINY,
            plan=plan,
            collectives=groups.tensor,
            peers=own.peers(plan, groups, TINY_HIDDEN, 1024),
            copies=own.copies(groups, TINY_HIDDEN, TINY_TOKENS) if parts > 1 else None,
            micro_batches=parts,
            halved_from=64,
            **options,  # type: ignore[arg-type]
        )
        own.meet()
        found = logits(model)
        error = float((found - whole).norm() / whole.norm())
        own.note(f"halves, {plan}: relative error of logits, hy3-tiny, {parts} parts", error, "", bar=0.1)


def _timed(own: Rank, plan: ParallelPlan, groups: RankGroups, tokens: int) -> None:
    config = cut_hy3(own.layers, dry=own.dry)
    took = []
    for parts in (1, 2):
        share = build_share(
            config,
            plan,
            groups,
            own.device,
            own.peers(plan, groups, config.hidden_size, tokens),
            micro_batches=parts,
            copies=own.copies(groups, config.hidden_size, tokens) if parts > 1 else None,
            halved_from=1,
        )
        cache = share.model.new_kv_cache(-(-tokens // 64))
        run = TokenRun(share.token_ids(tokens), 0, range(-(-tokens // 64)))
        work: Callable[[], object] = partial(share.model.forward, ForwardBatch.pack([run], device=own.device), cache)
        own.seconds(work, 1)
        by_op = own.slowest(min(own.seconds(work, REPEATS)))
        if not own.dry:
            work = _captured(work)
        took.append(own.slowest(min(own.seconds(work, REPEATS))))
        name = f"halves of {tokens}, {plan}: {parts} parts, {own.layers} layers"
        own.note(name, 1e3 * took[-1], "ms", by_op=round(1e3 * by_op, 4))
        del share, cache, work
    own.note(f"halves of {tokens}, {plan}: two parts shorter than one", 100 * (1 - took[1] / took[0]), "%")


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.inference_mode(), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        work()
        graph.capture_end()
    return graph.replay
