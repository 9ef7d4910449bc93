"""Every architecture against the transformers implementation of the same name, in fp32."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.models.decoder_lm import DecoderLM
from torch import Tensor

from tests.engine.models.families import VOCAB, Family, forward, greedy, prompt

LENGTHS = (1, 63, 64, 65, 1000)
TOLERANCE = 1e-4


def assert_logits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert expected.std() > 0.5  # else the tolerance would say nothing
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompt(family: Family, model: DecoderLM, length: int) -> None:
    ids = prompt(length)
    cache = model.new_kv_cache(20)
    pages = [3 + i for i in range(-(-length // 64))]
    assert_logits(model.logits(forward(model, cache, ids, pages)), family.reference_logits(ids))


@pytest.mark.parametrize("chunk", [1, 37, 64, 256])
def test_chunked_prompt(family: Family, model: DecoderLM, chunk: int) -> None:
    length = 65 if chunk == 1 else 1000
    ids = prompt(length)
    cache = model.new_kv_cache(20)
    pages = [(7 * i) % 20 for i in range(-(-length // 64))]
    parts = [forward(model, cache, ids[start : start + chunk], pages, start=start) for start in range(0, length, chunk)]
    assert_logits(model.logits(torch.cat(parts)), family.reference_logits(ids))


@pytest.mark.parametrize(("prefix", "length"), [(64, 65), (64, 128), (960, 1000)])
def test_prefix_hit(family: Family, model: DecoderLM, prefix: int, length: int) -> None:
    """Another sequence computed the prefix; its full pages are read as they lie."""
    ids = prompt(length)
    cache = model.new_kv_cache(40)
    shared = list(range(prefix // 64))
    forward(model, cache, ids[:prefix] + prompt(70, seed=1), [*shared, 30, 31])
    hidden = forward(model, cache, ids[prefix:], [*shared, 35], start=prefix)
    assert_logits(model.logits(hidden), family.reference_logits(ids)[prefix:])


def test_mixed_batch(family: Family, model: DecoderLM) -> None:
    """Decodes, a fresh prompt and a later chunk in one packed batch."""
    cache = model.new_kv_cache(40)
    decodes = [prompt(65, seed=2), prompt(130, seed=3)]
    pages = [[0, 1], [2, 3, 4]]
    for ids, table in zip(decodes, pages, strict=True):
        forward(model, cache, ids[:-1], table)
    later = prompt(200, seed=4)
    forward(model, cache, later[:100], [10, 11])
    fresh = prompt(33, seed=5)
    runs = [TokenRun(ids[-1:], len(ids) - 1, table) for ids, table in zip(decodes, pages, strict=True)]
    runs += [TokenRun(fresh, 0, [20]), TokenRun(later[100:], 100, [10, 11, 12, 13])]
    hidden = model.forward(ForwardBatch.pack(runs, num_decodes=2), cache)
    expected = [family.reference_logits(ids)[-1:] for ids in decodes]
    expected += [family.reference_logits(fresh), family.reference_logits(later)[100:]]
    assert_logits(model.logits(hidden), torch.cat(expected))


@pytest.mark.parametrize("length", [1, 64, 100])
def test_greedy_tokens(family: Family, model: DecoderLM, length: int) -> None:
    ids = prompt(length)
    tokens = greedy(model, ids, 64)
    assert tokens == family.reference_greedy(ids, 64)
    assert len(set(tokens)) > 3
    assert max(tokens) < VOCAB
