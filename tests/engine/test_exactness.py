"""What a request says never depends on how it is computed: hits, preemptions and numbers of every kind."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from katydid_engine.loader import load_model
from katydid_engine.messages import ChoiceEnd
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.request import Request, Sampling, Sequence
from katydid_engine.scheduler import Scheduler
from katydid_runtime.block_hash import ChainKey

from tests.engine.test_runner import generate, requests
from tests.tiny_model import write_tiny_model

BLOCK = 64
PROMPT = array("I", [(place * 5 + place // 7 + 1) % 250 for place in range(3 * BLOCK)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "mtp", "hy_v3", num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> DecoderLM:
    return load_model(folder)


def a_request(handle: int, prompt: array[int], *, max_tokens: int) -> Request:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=handle % 3 * 0.5, seed=handle)
    return Request(handle, prompt, ChainKey(b"m" * 32), sampling)


def test_prefix_hits_at_every_offset_in_a_block(model: DecoderLM) -> None:
    """Of blocks that others computed, the draft layer's pages with them."""
    others = [a_request(-1 - copy, PROMPT, max_tokens=1) for copy in range(8)]
    asked = [a_request(offset, PROMPT[: 2 * BLOCK + offset], max_tokens=5) for offset in range(BLOCK)]
    expected = generate(model, [replace(request, bypass_cache=True) for request in asked])
    for drafts, ahead in ((0, False), (3, True)):
        ends: list[ChoiceEnd] = []
        found = generate(model, [*others, *asked], drafts=drafts, ahead=ahead, buckets=ahead, finished=ends)
        assert {key: tokens for key, tokens in found.items() if key[0] >= 0} == expected
        cached = {end.handle: end.cached.device for end in ends if end.handle >= 0}
        assert cached == {0: 2 * BLOCK - 1} | dict.fromkeys(range(1, BLOCK), 2 * BLOCK)


def test_preemption_at_every_length_modulo_a_block(model: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of two sequences makes room for the first when that comes to another block."""
    lengths: list[int] = []
    preempt = Scheduler._preempt

    def noted(self: Scheduler, sequence: Sequence) -> None:
        lengths.append(sequence.num_tokens % BLOCK)
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", noted)
    first = a_request(0, PROMPT[: BLOCK - 1], max_tokens=4)
    later = [a_request(length, PROMPT[1 : 1 + length], max_tokens=4) for length in range(BLOCK + 1, 2 * BLOCK + 1)]
    expected = generate(model, [first, *later])
    assert not lengths
    for request in later:
        ahead = request.handle % 2 == 0
        found = generate(model, [first, request], num_pages=3, most=3 * BLOCK, drafts=2 * ahead, ahead=ahead)
        assert found == {key: expected[key] for key in ((0, 0), (request.handle, 0))}
    assert set(lengths) == set(range(BLOCK))


@pytest.mark.parametrize("scheme", ["fp8", "w4a8"])
def test_quantised_in_any_way_it_is_computed(folder: Path, scheme: str) -> None:
    """Scales are a row's own, or constant: company and cuts change no bit."""
    model = load_model(folder, quantization=scheme, kv_cache_dtype="fp8")
    asked = requests()[::2]
    expected = generate(model, asked)
    assert generate(model, asked, drafts=2, ahead=True, buckets=True, num_pages=10, chunk=60) == expected
    assert expected != generate(load_model(folder), asked), "it matters how weights are kept"
