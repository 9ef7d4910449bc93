"""Submissions: what is at a limit is taken as it came, what is a step beyond is refused by its field's name."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

import pytest
from google.protobuf.duration_pb2 import Duration
from katydid.engine.v1 import engine_pb2 as pb
from katydid_engine.grammar import Grammar, GrammarKind
from katydid_engine.request import Request, Sampling
from katydid_engine.submission import EngineLimits, parse_submission, requested_choices
from katydid_runtime.block_hash import ChainKey
from katydid_runtime.errors import InvalidRequestError, KatydidError, PromptTooLongError, UnsupportedError
from katydid_runtime.request_limits import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_CHOICES

from tests.engine.engine_process import submission

LIMITS = EngineLimits(b"i" * 32, vocab_size=100, max_model_tokens=20, max_choices=4, max_logprobs=5, dp_ranks=2)

WITHIN = Duration(seconds=1)


def parse(prompt: list[int] | None = None, **fields: object) -> Request:
    return parse_submission(submission(3, [1, 2] if prompt is None else prompt, **fields), LIMITS, 9, 1.5)


def test_every_field_arrives() -> None:
    before = time.monotonic()
    request = parse(
        [1, 2, 99], generated_ids=array("I", (4, 5)).tobytes(), dp_rank=1, priority=-7, cache_salt=b"salt",
        public_blocks=3, tenant=b"t" * 16, bypass_cache=True, timeout=Duration(seconds=60), hold=Duration(seconds=2),
        seed=2**64 - 1, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=-0.5, frequency_penalty=0.75, logit_bias={9: 2.0, 3: -1.0}, stop_token_ids=[8, 2],
        min_tokens=4, max_tokens=6, logprobs=2, prompt_logprobs=0, ignore_eos=True,
    )  # fmt: skip
    assert (request.handle, request.received_at) == (9, 1.5)
    assert (list(request.prompt), list(request.generated)) == ([1, 2, 99], [4, 5])
    assert request.chain == ChainKey(b"i" * 32, salt=b"salt", public_blocks=3)
    assert (request.priority, request.tenant, request.bypass_cache, request.hold_s) == (-7, b"t" * 16, True, 2.0)
    assert request.deadline is not None
    assert before + 60 <= request.deadline <= time.monotonic() + 60
    assert request.sampling == Sampling(
        seed=2**64 - 1, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=-0.5, frequency_penalty=0.75, logit_bias=((3, -1.0), (9, 2.0)), stop_token_ids=(8, 2),
        min_tokens=4, max_tokens=6, n=1, logprobs=2, prompt_logprobs=0, ignore_eos=True,
    )  # fmt: skip


def test_blocks_of_another_engine() -> None:
    for fetch_only in (False, True):
        request = parse(blocks_within=Duration(seconds=3), fetch_only=fetch_only)
        assert (request.blocks_within_s, request.fetch_only) == (3.0, fetch_only)


def test_sparse_prefill_only_where_both_sides_allow_it() -> None:
    """Pages of a request that does not allow it have the identity of a model without the option."""
    both = replace(LIMITS, dense_identity=b"d" * 32)
    for limits, allows, identity in ((LIMITS, True, b"i"), (both, False, b"d"), (both, True, b"i")):
        request = parse_submission(submission(3, [1, 2], allow_sparse_prefill=allows), limits, 9, 1.5)
        assert request.chain == ChainKey(identity * 32)
        assert request.sparse_prefill == (allows and limits is both)


def test_what_is_not_said() -> None:
    request = parse()
    assert (request.deadline, request.hold_s, request.tenant) == (None, None, b"")
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (None, None)
    assert parse(top_k=100).sampling.top_k == 0, "the whole vocabulary is no filter"


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("temperature", [0.0, 2.0], [-0.01, 2.01, float("inf")]),
        ("top_p", [0.001, 1.0], [0.0, 1.01]),
        ("min_p", [0.0, 1.0], [-0.01, 1.01]),
        ("repetition_penalty", [0.01, 2.0], [0.0, 2.01, float("nan")]),
        ("presence_penalty", [-2.0, 2.0], [-2.01, 2.01]),
        ("frequency_penalty", [-2.0, 2.0], [-2.01, 2.01]),
        ("logit_bias", [{0: -100.0, 99: 100.0}], [{100: 1.0}, {0: 100.1}]),
        ("stop_token_ids", [[0, 99], [1] * 64], [[100], [1] * 65]),
        ("max_tokens", [1, 1000], [0]),
        ("min_tokens", [0, 8], [9]),
        ("n", [1, 4], [0, 5]),
        ("logprobs", [0, 5], [6]),
        ("prompt_logprobs", [0, 5], [6]),
        ("priority", [-1000, 1000], [-1001, 1001]),
        ("dp_rank", [0, 1], [2]),
        ("tenant", [b"", b"x" * 16], [b"x" * 17]),
        ("cache_salt", [b"", b"x" * 64], [b"x" * 65]),
        ("timeout", [Duration(nanos=1)], [Duration(), Duration(seconds=-1)]),
        ("hold", [Duration(nanos=1)], [Duration()]),
        ("blocks_within", [Duration(nanos=1), Duration(seconds=600)], [Duration(), Duration(seconds=601)]),
        ("prompt_ids", [[0, 99], [1] * 19], [[], [100]]),
    ],
)
def test_limits(field: str, taken: list[object], refused: list[object]) -> None:
    name = "prompt" if field == "prompt_ids" else field
    for value in taken:
        parse(**{name: value})  # type: ignore[arg-type]
    for value in refused:
        with pytest.raises(InvalidRequestError) as caught:
            parse(**{name: value})  # type: ignore[arg-type]
        assert caught.value.field is not None
        assert caught.value.field.removeprefix("sampling.") == field
        assert caught.value.allowed


def test_a_thousand_biased_tokens_at_most() -> None:
    wide = EngineLimits(b"i" * 32, vocab_size=2000, max_model_tokens=20, max_choices=4, max_logprobs=5, dp_ranks=2)
    for count, allowed in ((1024, True), (1025, False)):
        message = submission(1, [1], logit_bias=dict.fromkeys(range(count), 1.0))
        if allowed:
            parse_submission(message, wide, 1, 0.0)
        else:
            with pytest.raises(InvalidRequestError, match="1025 entries"):
                parse_submission(message, wide, 1, 0.0)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"prompt": [1] * 20}, PromptTooLongError, "prompt_ids"),
        ({"prompt": [1] * 18, "generated_ids": b"\1\0\0\0" * 2}, PromptTooLongError, "prompt_ids"),
        ({"generated_ids": b"\1\0\0"}, InvalidRequestError, "generated_ids"),
        ({"fetch_only": True}, InvalidRequestError, "fetch_only"),
        ({"fetch_only": True, "blocks_within": WITHIN, "n": 2}, InvalidRequestError, "sampling.n"),
        ({"bypass_cache": True, "blocks_within": WITHIN}, InvalidRequestError, "bypass_cache"),
        ({"prompt_logprobs": 0, "blocks_within": WITHIN}, InvalidRequestError, "sampling.prompt_logprobs"),
        ({"generated_ids": b"\1\0\0\0", "n": 2}, InvalidRequestError, "sampling.n"),
        ({"generated_ids": b"\1\0\0\0", "max_tokens": 1}, InvalidRequestError, "sampling.max_tokens"),
        ({"grammar": pb.Grammar(regex="a")}, UnsupportedError, "sampling.grammar.regex"),
        ({"grammar": pb.Grammar()}, InvalidRequestError, "sampling.grammar"),
        ({"adapter": "poet"}, UnsupportedError, "adapter"),
    ],
)
def test_what_contradicts_itself_or_is_not_served(
    fields: dict[str, object], error: type[KatydidError], field: str
) -> None:
    with pytest.raises(error) as caught:
        parse(**fields)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert caught.value.allowed


def test_a_refusal_ends_as_many_choices_as_there_can_be() -> None:
    for asked, ended in ((1, 1), (4, 4), (5, 1), (0, 1)):
        assert requested_choices(submission(1, [1], n=asked), LIMITS) == ended


def test_grammars() -> None:
    served = replace(LIMITS, grammar_kinds=tuple(GrammarKind))

    def grammar(**fields: object) -> Grammar | None:
        message = submission(3, [1], grammar=pb.Grammar(**fields))  # type: ignore[arg-type]
        return parse_submission(message, served, 9, 1.5).sampling.grammar

    marker = array("I", (9, 8)).tobytes()
    assert grammar(regex="a+", begin_after_ids=marker) == Grammar(GrammarKind.REGEX, "a+", (9, 8))
    assert grammar(ebnf='root ::= "a"') == Grammar(GrammarKind.EBNF, 'root ::= "a"')
    assert grammar(choice=pb.ChoiceGrammar(choices=["a", "é"])) == Grammar(GrammarKind.CHOICE, '["a", "\\u00e9"]')
    assert grammar(structural_tag="{}") == Grammar(GrammarKind.STRUCTURAL_TAG, "{}")
    assert grammar(structural_tag="{") == Grammar(GrammarKind.STRUCTURAL_TAG, "{")
    refused: list[tuple[dict[str, object], str]] = [
        ({"choice": pb.ChoiceGrammar()}, "choice.choices"),
        ({"choice": pb.ChoiceGrammar(choices=["a", ""])}, "choice.choices"),
        ({"choice": pb.ChoiceGrammar(choices=["a"] * (MAX_GRAMMAR_CHOICES + 1))}, "choice.choices"),
        ({"choice": pb.ChoiceGrammar(choices=["a" * (MAX_GRAMMAR_CHARACTERS // 2)] * 3)}, "choice"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "regex"),
        ({"regex": "a", "begin_after_ids": marker[:-1]}, "begin_after_ids"),
        ({"regex": "a", "begin_after_ids": marker * 9}, "begin_after_ids"),
        ({"regex": "a", "begin_after_ids": array("I", (100,)).tobytes()}, "begin_after_ids"),
    ]
    for fields, field in refused:
        with pytest.raises(InvalidRequestError) as caught:
            grammar(**fields)
        assert caught.value.field == f"sampling.grammar.{field}"
