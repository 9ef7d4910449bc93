"""The fp32 reference path on CPU: a token's hidden state has the same bits however the batch around it looks.

Token equality between configurations follows from this; a tolerance would only make unequal tokens rare.
"""

from __future__ import annotations

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.models.decoder_lm import DecoderLM
from torch import Tensor

from tests.engine.models.families import forward, prompt

LENGTH = 201
PAGES = [0, 1, 2, 3]


@pytest.fixture
def whole(model: DecoderLM) -> Tensor:
    """Hidden states of the prompt computed alone and at once."""
    return forward(model, model.new_kv_cache(4), prompt(LENGTH), PAGES)


@pytest.mark.parametrize("chunk", [3, 64, 100])
def test_chunking(model: DecoderLM, whole: Tensor, chunk: int) -> None:
    cache = model.new_kv_cache(4)
    ids = prompt(LENGTH)
    parts = [forward(model, cache, ids[start : start + chunk], PAGES, start=start) for start in range(0, LENGTH, chunk)]
    assert torch.equal(torch.cat(parts), whole)


def test_decoding_equals_prefilling(model: DecoderLM, whole: Tensor) -> None:
    """What a preempted request relies on: it decoded these tokens once and prefills them on resume."""
    cache = model.new_kv_cache(4)
    ids = prompt(LENGTH)
    forward(model, cache, ids[:180], PAGES)
    for position in range(180, LENGTH):
        run = TokenRun([ids[position]], position, PAGES)
        hidden = model.forward(ForwardBatch.pack([run], num_decodes=1), cache)
        assert torch.equal(hidden[0], whole[position]), position


@pytest.mark.parametrize("others", [1, 2, 6, 30])
def test_company_in_the_batch(model: DecoderLM, whole: Tensor, others: int) -> None:
    """One decode among others' decodes and prompts."""
    cache = model.new_kv_cache(4 + 2 * others)
    ids = prompt(LENGTH)
    forward(model, cache, ids[:-1], PAGES)
    runs = [TokenRun(ids[-1:], LENGTH - 1, PAGES)]
    for other in range(others):
        length = 1 if other % 2 else 5 + other
        runs.append(TokenRun(prompt(length, seed=other), 0, [4 + 2 * other, 5 + 2 * other]))
    hidden = model.forward(ForwardBatch.pack(runs, num_decodes=1), cache)
    assert torch.equal(hidden[0], whole[-1])


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_logits_rows(model: DecoderLM, whole: Tensor, rows: int) -> None:
    assert torch.equal(model.logits(whole[-rows:]), model.logits(whole)[-rows:])


def test_first_tokens(model: DecoderLM, whole: Tensor) -> None:
    """Prompts of one to nine tokens make the narrowest products."""
    for length in range(1, 10):
        assert torch.equal(forward(model, model.new_kv_cache(1), prompt(LENGTH)[:length], [0]), whole[:length])
