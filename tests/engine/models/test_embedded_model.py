"""The trained model that comes with the code, against transformers: real weights, two shards, released spelling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.hy_v3 import HyV3
from tokenizers import Tokenizer

from tests.engine.models.families import forward, greedy

FOLDER = Path(__file__).parents[3] / "models" / "hy3-tiny"
TEXT = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return"


@pytest.fixture(scope="module")
def model() -> HyV3:
    model = load_model(FOLDER)
    assert isinstance(model, HyV3)
    return model


@pytest.fixture(scope="module")
def ids() -> list[int]:
    found: list[int] = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(TEXT).ids
    return found


def test_against_transformers(model: HyV3, ids: list[int]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    reference = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    reference.set_experts_implementation("eager")
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
        tokens = reference.generate(
            torch.tensor([ids]), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
        )[0, len(ids) :].tolist()
    found = model.logits(forward(model, model.new_kv_cache(4), ids, [0, 1, 2, 3]))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert greedy(model, ids, 32) == tokens


def test_drafts_agree_with_the_target(model: HyV3, ids: list[int]) -> None:
    """A trained draft layer guesses most of what the target says next; a wrong wiring guesses none of it."""
    ids = ids + greedy(model, ids, 64)
    cache = model.new_kv_cache(4)
    batch = ForwardBatch.pack([TokenRun(ids[:-1], 0, [0, 1, 2, 3])])
    hidden = model.forward(batch, cache)
    target = model.logits(hidden).argmax(-1)[1:]
    drafted = model.draft(batch, hidden, torch.tensor(ids[1:], dtype=torch.int32), cache)
    assert (model.logits(drafted).argmax(-1)[:-1] == target).float().mean() > 0.5
