"""Few rows of ranks that have requests of their own go to all of them: the logits are one rank's, and messages the same
ranks' where there are more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from torch import Tensor
from transformers import HYV3Config

from tests.engine.models.families import EXPERTS, SIZES, forward, make_family, prompt
from tests.engine.thread_group import ThreadGroup, on_ranks

RANKS, PROMPTS, TOKENS = 4, 2, 30


class ReferencePeers:
    """What the kernels are defined by, over a group of threads; counts rows."""

    def __init__(self, group: ThreadGroup, few_tokens: int) -> None:
        self.few_tokens = few_tokens
        self._group = group
        self.rows: list[int] = []

    def sum_few(self, x: Tensor, *, overlap: bool = False) -> Tensor:
        del overlap
        assert x.is_contiguous()
        self.rows.append(len(x))
        return self._group.all_reduce(x)

    def all_reduce_few(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, fp8: bool = False, overlap: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = HYV3Config(**SIZES, **EXPERTS, head_dim=32)
    return make_family("hy_v3", tmp_path_factory.mktemp("hy_v3"), config=config).folder


def step(model: DecoderLM, ids: list[int], tokens: list[int]) -> list[Tensor]:
    """Logits of a prompt, and behind it of ``tokens`` in one more pass."""
    cache, pages = model.new_kv_cache(2), [0, 1]
    seen = [model.logits(forward(model, cache, ids, pages))]
    run = TokenRun(tokens, len(ids), pages)
    return [*seen, model.logits(model.forward(ForwardBatch.pack([run]), cache))]


@pytest.mark.parametrize(("few_tokens", "new", "to_all"), [(4, 1, True), (12, 3, True), (11, 3, False)])
def test_few_rows_go_to_all(folder: Path, few_tokens: int, new: int, to_all: bool) -> None:
    """Two of the ranks have none, and nothing but their experts to add."""
    ids = [prompt(TOKENS + number) for number in range(PROMPTS)]
    alone = load_model(folder)
    expected = [step(alone, own, own[:new]) for own in ids]

    def work(group: ThreadGroup) -> tuple[list[Tensor], list[int], int]:
        peers = ReferencePeers(group, few_tokens)
        model = load_model(folder, plan=ParallelPlan(dp=RANKS, ep=RANKS), experts=group, expert_peers=peers)
        model.exchange_rows(TOKENS + PROMPTS)
        if group.rank >= PROMPTS:
            model.take_part(0, TOKENS + PROMPTS)
            model.take_part(0, new)
            return [], peers.rows, len(model.dispatched)
        own, cache, pages = ids[group.rank], model.new_kv_cache(2), [0, 1]
        first = model.logits(forward(model, cache, own, pages))
        model.exchange_rows(new)
        run = TokenRun(own[:new], len(own), pages)
        second = model.logits(model.forward(ForwardBatch.pack([run]), cache))
        return [first, second], peers.rows, len(model.dispatched)

    for rank, (found, rows, layers) in enumerate(on_ranks(RANKS, work)):
        assert rows == [RANKS * new] * (2 * layers * to_all)
        for logits, wanted in zip(found, expected[rank] if rank < PROMPTS else [], strict=True):
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def test_copies_of_experts_are_sent_to_by_messages(folder: Path) -> None:
    """A copy takes some of its expert's tokens: which ones no other rank is told."""

    def work(group: ThreadGroup) -> list[int]:
        peers = ReferencePeers(group, 64)
        plan = ParallelPlan(dp=RANKS, ep=RANKS, redundant_experts=RANKS)
        model = load_model(folder, plan=plan, experts=group, expert_peers=peers)
        model.take_part(0, 1)
        return peers.rows

    assert on_ranks(RANKS, work) == [[]] * RANKS
