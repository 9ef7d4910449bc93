"""Calls that a model wrote, held against their schemas and against what was asked."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_cli.evaluation.recall import evaluation_words
from katydid_cli.evaluation.scorer import Continuation
from katydid_cli.evaluation.text import ModelText
from katydid_cli.evaluation.tool_calls import fits, is_valid, parse_call, tool_calls
from katydid_cli.evaluation.tool_schemas import make_case, sorted_keys

from tests.cli.evaluation.paper_scorer import PaperScorer

CALL = "<tool_calls>\n<tool_call>{}<tool_sep>\n{}</tool_call>\n</tool_calls>"
ARGUMENT = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"


def rendered(name: str, arguments: dict[str, str]) -> str:
    return CALL.format(name, "".join(ARGUMENT.format(k, v) for k, v in arguments.items()))


@given(st.integers(0, 10**9))
def test_a_made_case_is_answered_by_its_own_call(seed: int) -> None:
    case = make_case(random.Random(seed), evaluation_words())
    assert parse_call(rendered(case.name, case.arguments)) == (case.name, case.arguments)
    assert is_valid((case.name, case.arguments), case.tools)
    assert is_valid((case.name, case.arguments), sorted_keys(case.tools))
    assert all(value in case.request for value in case.arguments.values())


@pytest.mark.parametrize(
    "text",
    [
        "Hello!",
        rendered("f", {"a": "1"}) + " and more",
        rendered("f", {"a": "1"}) * 2,
        CALL.format("f", "<arg_key>a</arg_key>"),
        CALL.format("f", ARGUMENT.format("a", "1") * 2),
        "<tool_calls>\n<tool_call>f\n</tool_call>\n</tool_calls>",
    ],
)
def test_what_is_not_one_whole_call_is_none(text: str) -> None:
    assert parse_call(text) is None


def test_calls_are_held_against_the_schema() -> None:
    case = make_case(random.Random(3), evaluation_words())
    name, arguments = case.name, case.arguments
    assert not is_valid(None, case.tools)
    assert not is_valid(("unknown_tool", arguments), case.tools)
    assert not is_valid((name, arguments | {"never_named": "1"}), case.tools)
    assert not is_valid((name, {}), case.tools)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ({"type": "integer"}, "-7", "7.5"),
        ({"type": "integer"}, "12", "true"),
        ({"type": "number"}, "7.25", "seven"),
        ({"type": "boolean"}, "true", "True"),
        ({"type": "string", "enum": ["x", "y"]}, "y", "z"),
    ],
)
def test_values_fit_their_type(kind: dict[str, object], good: str, bad: str) -> None:
    assert fits(kind, good)
    assert not fits(kind, bad)
    assert fits({"type": "string"}, bad)


def test_rates_tell_valid_from_exact(text: ModelText) -> None:
    cases = [make_case(random.Random(f"tools/{n}"), evaluation_words()) for n in range(6)]
    replies = iter(
        [text.encode(rendered(c.name, c.arguments)) for c in cases[:3]]
        + [text.encode(rendered(c.name, {k: _other(v) for k, v in c.arguments.items()})) for c in cases[3:5]]
        + [text.encode("I cannot.")]
    )

    def answer(ids: Sequence[int]) -> Continuation:
        assert text.decode(ids).endswith("<｜hy_Assistant｜><think></think>")
        return Continuation(list(next(replies)))

    valid, exact = tool_calls(PaperScorer(continuation=answer), text, 6)
    assert exact.value == pytest.approx(3 / 6)
    assert exact.value <= valid.value <= 5 / 6


def _other(value: str) -> str:
    return value + "1" if value.isdigit() else value
