"""Drafts and steps planned ahead change how fast tokens come, never which: the same seed, the same tokens."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from katydid_engine.loader import load_model
from katydid_engine.messages import ChoiceEnd
from katydid_engine.models.decoder_lm import DecoderLM

from tests.engine.test_runner import Output, generate, requests
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    torch.set_num_threads(1)
    return load_model(write_tiny_model(tmp_path_factory.mktemp("models") / "mtp", "hy_v3", num_nextn_predict_layers=1))


@pytest.fixture(scope="module")
def plain(model: DecoderLM) -> Output:
    return generate(model, requests())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_the_same_tokens(model: DecoderLM, plain: Output, drafts: int, ahead: bool) -> None:
    finished: list[ChoiceEnd] = []
    assert generate(model, requests(), drafts=drafts, ahead=ahead, finished=finished) == plain
    drafted = sum(end.drafted for end in finished)
    assert (drafted > 0) == (drafts > 0)
    assert 0 <= sum(end.accepted for end in finished) <= drafted
    fields = {"drafts": drafts, "ahead": ahead}
    assert generate(model, requests(), chunk=40, **fields) == plain, "in small chunks"  # type: ignore[arg-type]
    few = {"num_pages": 10, "chunk": 100, **fields}
    assert generate(model, requests(), **few) == plain, "preempted again and again"  # type: ignore[arg-type]
    resumed = []
    for request in requests():
        if request.sampling.n == 1:
            first = plain[request.handle, 0][: len(plain[request.handle, 0]) // 2]
            resumed.append(replace(request, generated=array("I", first)))
    rest = generate(model, resumed, **fields)  # type: ignore[arg-type]
    for request in resumed:
        assert [*request.generated, *rest[request.handle, 0]] == plain[request.handle, 0]
