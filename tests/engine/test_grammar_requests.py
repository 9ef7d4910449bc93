"""Requests with grammars through scheduler, runner and a model: texts satisfy them, whatever happens meanwhile."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.grammar import Grammar, GrammarKind
from katydid_engine.json_schema_rules import enforceable
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Start
from katydid_engine.request import Request, Sampling
from katydid_engine.sequence_sampler import SequenceSampler
from katydid_runtime.block_hash import ChainKey

from tests.engine.test_runner import generate
from tests.tiny_model import EOS_ID, VOCAB_SIZE, _tokenizer, write_tiny_model

pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": -5, "maximum": 80}},
    "required": ["name", "n"],
}
GRAMMARS = [
    Grammar(GrammarKind.JSON_SCHEMA, enforceable(json.dumps(SCHEMA))),
    Grammar(GrammarKind.REGEX, "[a-c]{3,9}-x"),
    Grammar(GrammarKind.CHOICE, '["yes", "no", "yes, but"]'),
    Grammar(GrammarKind.REGEX, "[0-9]{30}"),
    Grammar(GrammarKind.REGEX, "[a-c]{3,9}-x", begin_after=(40,)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "mtp", "hy_v3", num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> DecoderLM:
    return load_model(folder)


@pytest.fixture(scope="module")
def grammars(folder: Path) -> CompiledGrammars:
    return CompiledGrammars(folder, VOCAB_SIZE, (EOS_ID,))


def requests() -> list[Request]:
    samplings = [
        Sampling(max_tokens=80),
        Sampling(max_tokens=80, temperature=1.0, n=2),
        Sampling(max_tokens=80, temperature=1.5, top_k=40, frequency_penalty=0.5, min_tokens=30, ignore_eos=True),
        Sampling(max_tokens=80, temperature=0.8, logit_bias=((EOS_ID, 9.0),), stop_token_ids=(66,)),
    ]
    return [
        Request(
            handle,
            array("I", [(place * 7 + place * place) % 250 for place in range(40 + 30 * (handle % 4))]),
            ChainKey(b"m" * 32),
            replace(samplings[handle % 4], seed=handle, grammar=GRAMMARS[handle % 5]),
        )
        for handle in range(10)
    ]


def check(request: Request, tokens: list[int]) -> None:
    grammar = request.sampling.grammar
    assert grammar is not None
    if grammar.begin_after:
        assert EOS_ID not in tokens[:-1]
        if 40 not in tokens:
            assert len(tokens) == 80
            return
        tokens = tokens[tokens.index(40) + 1 :]
    assert tokens
    if tokens[-1] in (EOS_ID, 66):
        tokens = tokens[:-1]
    text = _tokenizer().decode(tokens)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        if len(tokens) < 80:
            jsonschema.validate(json.loads(text), SCHEMA)
    elif grammar.kind is GrammarKind.CHOICE:
        assert text in ("yes", "no", "yes, but")
    else:
        assert re.fullmatch(grammar.source, text)


def test_outputs_satisfy_their_grammars_whatever_happens(model: DecoderLM, grammars: CompiledGrammars) -> None:
    expected = generate(model, requests(), grammars=grammars)
    for request in requests():
        for choice in range(request.sampling.n):
            check(request, expected[request.handle, choice])
    assert generate(model, requests(), grammars=grammars, drafts=2) == expected, "with drafts"
    ahead = generate(model, requests(), chunk=40, num_pages=10, grammars=grammars, drafts=3, ahead=True, buckets=True)
    assert ahead == expected, "with drafts, prepared steps, steps ahead, small chunks and preemptions"
    resumed, rest = [], {}
    for request in requests():
        if request.sampling.n == 1:
            first = expected[request.handle, 0][: len(expected[request.handle, 0]) // 2]
            rest[request.handle, 0] = expected[request.handle, 0][len(first) :]
            resumed.append(replace(request, generated=array("I", first)))
    assert generate(model, resumed, grammars=grammars, drafts=1) == rest, "gone on with in the middle of the grammar"


def test_what_was_generated_elsewhere_must_fit(model: DecoderLM, grammars: CompiledGrammars) -> None:
    from katydid_engine.block_pool import BlockPool
    from katydid_engine.collectives import SingleRank
    from katydid_engine.runner import Runner
    from katydid_engine.scheduler import Scheduler, SchedulerConfig

    (wrong,) = _tokenizer().encode("z").ids
    sampling = Sampling(grammar=GRAMMARS[1])
    request = Request(1, array("I", (1, 2)), ChainKey(b"m" * 32), sampling, generated=array("I", (wrong,)))
    config = SchedulerConfig(max_model_tokens=100, max_batch_tokens=10, max_sequences=2)
    scheduler = Scheduler(config, BlockPool(4), lambda: 0.0)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, Runner(model, 4, collectives=SingleRank(), grammars=grammars).run(plan))
    outcome = scheduler.take_outcome()
    assert not outcome.tokens
    assert (outcome.ends[0].error, outcome.ends[0].message) == (
        "INVALID_REQUEST",
        "generated_ids[0] does not go on in the grammar",
    )


def test_a_grammar_that_only_the_worker_cannot_compile_ends_its_request(grammars: CompiledGrammars) -> None:
    start = Start(1, Sampling(grammar=Grammar(GrammarKind.REGEX, "(a")), 1, array("I", (1,)))
    sampler = SequenceSampler(start, (EOS_ID,), grammars)
    assert "not closed" in sampler.misfit
    assert sampler.limits(0, [5, 6]) == [({}, None)] * 3


def test_a_grammar_that_takes_ever_longer_ends_its_request(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("katydid_engine.sequence_sampler._PATIENCE_S", 0.002)
    (letter,) = _tokenizer().encode("a").ids
    ambiguous = Grammar(GrammarKind.EBNF, 'root ::= s\ns ::= s s s | s s | "a"')
    start = Start(1, Sampling(grammar=ambiguous), 1, array("I", (1,)))
    sampler = SequenceSampler(start, (EOS_ID,), grammars)
    for _ in range(100):
        sampler.limits(0, [letter])
        if sampler.misfit:
            break
        sampler.accept(array("I", (letter,)))
    assert "takes longer" in sampler.misfit
