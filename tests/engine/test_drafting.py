"""Drafts and steps planned ahead change how fast tokens come, never which: the same seed, the same tokens."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from katydid_engine.loader import load_model
from katydid_engine.messages import ChoiceEnd
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.request import FinishReason, Request, Sampling
from katydid_runtime.block_hash import ChainKey
from tokenizers import Tokenizer

from tests.engine.test_runner import Output, generate, requests
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    torch.set_num_threads(1)
    return load_model(write_tiny_model(tmp_path_factory.mktemp("models") / "mtp", "hy_v3", num_nextn_predict_layers=1))


@pytest.fixture(scope="module")
def plain(model: DecoderLM) -> Output:
    return generate(model, requests())


@pytest.mark.parametrize(
    ("drafts", "ahead", "buckets"), [(0, True, True), (1, False, False), (2, True, True), (3, False, True)]
)
def test_the_same_tokens(model: DecoderLM, plain: Output, drafts: int, ahead: bool, buckets: bool) -> None:
    """``buckets``: decodes are padded, over tensors that never move, as a captured graph runs them."""
    finished: list[ChoiceEnd] = []
    assert generate(model, requests(), drafts=drafts, ahead=ahead, buckets=buckets, finished=finished) == plain
    drafted = sum(end.drafted for end in finished)
    assert (drafted > 0) == (drafts > 0)
    assert 0 <= sum(end.accepted for end in finished) <= drafted
    fields = {"drafts": drafts, "ahead": ahead, "buckets": buckets}
    few = {"num_pages": 10, "chunk": 60, **fields}
    finished.clear()
    assert generate(model, requests(), finished=finished, **few) == plain, "in small chunks"  # type: ignore[arg-type]
    assert sum(end.preemptions for end in finished) > 3, "and preempted again and again"
    resumed = []
    for request in requests():
        if request.sampling.n == 1:
            first = plain[request.handle, 0][: len(plain[request.handle, 0]) // 2]
            resumed.append(replace(request, generated=array("I", first)))
    rest = generate(model, resumed, **fields)  # type: ignore[arg-type]
    for request in resumed:
        assert [*request.generated, *rest[request.handle, 0]] == plain[request.handle, 0]


def test_a_sequence_that_ends_amid_its_drafts_keeps_what_counts(model: DecoderLM, plain: Output) -> None:
    """Stop tokens, length limits and log probabilities cut where plain decoding does."""
    (request, *_) = (request for request in requests() if request.sampling == replace(request.sampling, n=1))
    output = plain[request.handle, 0]
    for length in range(1, 8):
        stopped = replace(request, sampling=replace(request.sampling, max_tokens=length, logprobs=1))
        for drafts in (1, 3):
            finished: list[ChoiceEnd] = []
            tokens = generate(model, [stopped], drafts=drafts, ahead=drafts == 3, finished=finished)
            assert tokens[request.handle, 0] == output[:length]
            assert (finished[0].reason, finished[0].output_tokens) == (FinishReason.LENGTH, length)
    stop = output[4]
    sampling = replace(request.sampling, stop_token_ids=(stop,), min_tokens=3)
    want = generate(model, [replace(request, sampling=sampling)])
    assert want[request.handle, 0][-1] == stop
    assert generate(model, [replace(request, sampling=sampling)], drafts=2, ahead=True) == want


def test_a_trained_draft_layer_is_right_more_often_than_not() -> None:
    folder = Path(__file__).parents[2] / "models" / "hy3-tiny"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (
        "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write(path, "
    )
    prompt = array("I", tokenizer.encode(text).ids)
    greedy = Request(1, prompt, ChainKey(b"m" * 32), Sampling(max_tokens=24, ignore_eos=True))
    sampled = Request(2, prompt, ChainKey(b"m" * 32), Sampling(max_tokens=24, ignore_eos=True, temperature=0.7, seed=3))
    trained = load_model(folder)
    finished: list[ChoiceEnd] = []
    drafted = generate(trained, [greedy, sampled], drafts=2, ahead=True, finished=finished)
    assert drafted == generate(trained, [greedy, sampled])
    assert sum(end.accepted for end in finished) > 12, "of 48 tokens"


def test_a_depth_that_changes_changes_no_token(model: DecoderLM, plain: Output) -> None:
    """Automatic, every depth is tried; the first step of each verifies what another left."""
    assert generate(model, requests(), drafts=3, automatic=True, ahead=True, buckets=True) == plain
