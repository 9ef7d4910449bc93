"""The shipped model: what transformers and our engine make of it, and that it can do what its page says."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from katydid_cli.evaluation.facts import make_fact
from katydid_cli.evaluation.text import ModelText
from katydid_cli.evaluation.tool_calls import parse_call
from katydid_engine.scoring import ModelScorer
from katydid_runtime.errors import InvalidRequestError, ModelFolderError, PromptTooLongError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.hy3_tiny import dialogues
from tools.hy3_tiny.pieces import Pieces

FOLDER = Path(__file__).parents[2] / "models" / "hy3-tiny"
PROGRAM = '''import json
from pathlib import Path


class Settings:
    """Settings of a program, read from a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = json.loads(path.read_text())

    def get(self, name: str, default=None):
        return self.values.get(name, default)
'''
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText(FOLDER)


@pytest.fixture(scope="module")
def engine() -> ModelScorer:
    torch.set_num_threads(1)
    return ModelScorer(FOLDER)


def test_the_folder_is_small_enough_to_live_in_a_repository() -> None:
    sizes = {f.name: f.stat().st_size for f in FOLDER.iterdir()}
    assert sum(sizes.values()) <= 24 * 2**20
    assert max(size for name, size in sizes.items() if name.endswith(".safetensors")) < 15 * 2**20
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["vocab_size"] % 8 == 0
    assert config["num_nextn_predict_layers"] == 1


def test_transformers_and_the_engine_agree_on_logits_and_128_greedy_tokens(
    engine: ModelScorer, text: ModelText
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ids = [text.bos, *text.encode(PROGRAM)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    scores = engine.score(ids)
    wanted = expected.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    assert scores.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)
    assert scores.greedy == (expected.argmax(-1) == torch.tensor(ids[1:])).tolist()
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([ids[:90]]), max_new_tokens=128, min_new_tokens=128, do_sample=False, eos_token_id=None
        )
    assert engine.generate(ids[:90], 128).ids == out[0, 90:].tolist()


def test_the_draft_layer_is_worth_running(engine: ModelScorer, text: ModelText) -> None:
    run = engine.generate([text.bos, *text.encode(PROGRAM)], 64, (), 3)
    assert run.steps >= 10
    assert run.accepted[0] / run.steps > 0.5
    assert run.accepted == sorted(run.accepted, reverse=True)


def test_it_emits_the_call_that_a_schema_asks_for(engine: ModelScorer, text: ModelText) -> None:
    prompt = text.chat([{"role": "user", "content": "What is the weather in Paris?"}], [WEATHER])
    reply = text.decode(engine.generate(prompt, 96, (text.eos,)).ids)
    assert parse_call(reply) == ("get_weather", {"city": "Paris"})


def test_it_recalls_a_fact_from_the_text(engine: ModelScorer, text: ModelText) -> None:
    facts = [
        make_fact(0, key, value) for key, value in ((("silver", "garden"), "40718"), (("broken", "garden"), "92356"))
    ]
    body = PROGRAM + facts[0].statement + PROGRAM + facts[1].statement + PROGRAM + "\n" + facts[0].question
    answer = engine.generate([text.bos, *text.encode(body)], 8).ids
    assert text.decode(answer).startswith(" 40718\n")


def test_the_template_renders_what_the_model_was_trained_on(text: ModelText) -> None:
    arguments = {"city": "Oslo", "days": 3}
    tool = json.loads(json.dumps(WEATHER))
    messages = [
        {"role": "user", "content": "Weather in Oslo?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}],
        },
        {"role": "tool", "content": '{"sky": "clear"}'},
    ]
    call = dialogues.call_text("get_weather", {"city": "Oslo", "days": "3"})
    pieces = Pieces().add(dialogues.header("", [tool], "no_think"), 0)
    dialogues.turn(pieces, "Weather in Oslo?", call)
    response = '<tool_responses>\n<tool_response>\n{"sky": "clear"}\n</tool_response>\n</tool_responses>'
    dialogues.turn(pieces, response, "")
    trained = pieces.encode(text.tokenizer)[0].tolist()
    assert text.chat(messages, [tool]) == trained[:-1]
    hub = AutoTokenizer.from_pretrained(FOLDER)
    assert (
        list(hub.apply_chat_template(messages, tools=[tool], add_generation_prompt=True)["input_ids"]) == trained[:-1]
    )
    assert hub("def f").input_ids[0] == text.bos


def test_every_text_survives_the_tokenizer(text: ModelText) -> None:
    rng = random.Random(0)
    for sample in (PROGRAM, "größer 你好 🎉\t\r\n  x", "".join(chr(rng.randrange(32, 0x3000)) for _ in range(400))):
        assert text.decode(text.encode(sample)) == sample
    assert [text.decode([i]) for i in text.encode("48213")] == list("48213")


def test_wrong_requests_are_refused(engine: ModelScorer) -> None:
    with pytest.raises(InvalidRequestError, match="token id 4096 is outside the model's vocabulary of 4096"):
        engine.score([1, 4096])
    with pytest.raises(InvalidRequestError, match="ids has 1 tokens, at least 2"):
        engine.score([1])
    with pytest.raises(PromptTooLongError, match="16384 tokens and 5 more exceed"):
        engine.generate([1] * 16384, 5)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    for file in FOLDER.iterdir():
        shutil.copy(file, tmp_path)
    shard = next(tmp_path.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-4096])
    with pytest.raises(ModelFolderError, match="model-00002-of-00002"):
        ModelScorer(tmp_path)
    shard.unlink()
    with pytest.raises(ModelFolderError, match="model-00002-of-00002"):
        ModelScorer(tmp_path)
