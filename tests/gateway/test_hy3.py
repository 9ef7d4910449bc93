"""Hy3's output format: any split of the text gives the same reasoning, content and tool calls."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.parsers.hy3 import HY3_MARKERS, Hy3Parser, thinks_already
from katydid_gateway.parsers.json_values import typed_value
from katydid_gateway.requests import Tool

WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "zip": {"type": ["string", "null"]},
        },
    },
)
CALLS = (
    "I will look.\n<tool_calls>\n<tool_call>weather<tool_sep>\n"
    "<arg_key>city</arg_key>\n<arg_value>Köln \"am\" Rhein</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n"
    "<tool_call>weather<tool_sep>\n<arg_key>where</arg_key>\n<arg_value>{\"x\": [1, 2]}</arg_value>\n"
    "<arg_key>zip</arg_key>\n<arg_value>50667</arg_value>\n<arg_key>new</arg_key>\n<arg_value>1.5</arg_value></tool_call>\n"
    "<tool_call>ping<tool_sep>\n</tool_call>\n</tool_calls>"
)  # fmt: skip
EXPECTED = [
    ("weather", {"city": 'Köln "am" Rhein', "days": 3, "exact": True}),
    ("weather", {"where": {"x": [1, 2]}, "zip": "50667", "new": 1.5}),
    ("ping", {}),
]


def parse(chunks: list[str], tools: tuple[Tool, ...] = (WEATHER,), *, reasoning: bool = False):
    parser = Hy3Parser(tools, reasoning=reasoning)
    content, thought, calls = "", "", {}
    for parsed in [*(parser.feed(chunk) for chunk in chunks), parser.finish()]:
        content += parsed.content
        thought += parsed.reasoning
        for part in parsed.tool_calls:
            name, arguments = calls.get(part.index, ("", ""))
            assert (part.name == "") == (part.index in calls), "the name comes with the first part and only then"
            assert bool(part.id) == bool(part.name)
            calls[part.index] = (name + part.name, arguments + part.arguments)
    return content, thought, [calls[index] for index in sorted(calls)]


def split(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2000), max_size=40))
def test_calls_in_any_split(cuts: list[int]) -> None:
    content, thought, calls = parse(split("<think>\nhm\n</think>\n\n" + CALLS, cuts))
    assert (content, thought) == ("I will look.\n", "hm\n")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == EXPECTED


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
    | st.sampled_from(["null", " null", "nul", "nullx", ""]),
    st.sampled_from(["city", "zip", "days", "new"]),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_a_value_is_the_same_in_any_split(value: str, key: str, cuts: list[int]) -> None:
    text = f"<tool_calls><tool_call>weather<tool_sep><arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    schema = WEATHER.parameters["properties"].get(key)  # type: ignore[index]
    for chunks in (split(text, cuts), list(text), [text]):
        ((_, arguments),) = parse(chunks)[2]
        assert json.loads(arguments) == {key: typed_value(value, schema)}


def test_a_text_flows_as_it_is_written() -> None:
    """It may be a whole file: its reader is not to wait for the end."""
    parser = Hy3Parser((WEATHER,))
    for key, flows in (("city", True), ("zip", True), ("days", False)):
        parser.feed(f"<tool_calls><tool_call>weather<tool_sep><arg_key>{key}</arg_key><arg_value>")
        lines = [parser.feed(f'a "{number}"\n').tool_calls for number in range(3)]
        assert ["".join(part.arguments for part in parts) for parts in lines[1:]] == (
            [f'a \\"{number}\\"\\n' for number in (1, 2)] if flows else ["", ""]
        )
        parser.feed("</arg_value></tool_call></tool_calls>")


def test_both_spellings_of_the_markers() -> None:
    text = "<think>hm</think>" + CALLS
    for marker in sorted(HY3_MARKERS, key=len, reverse=True):
        if ":opensource" not in marker:
            text = text.replace(marker, marker[:-1] + ":opensource>")
    content, thought, calls = parse(list(text))
    assert (content, thought) == ("I will look.\n", "hm")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == EXPECTED


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab<>/thinkool_cas \n", max_size=60), st.lists(st.integers(0, 60), max_size=10))
def test_text_without_markers_is_content_whatever_it_looks_like(text: str, cuts: list[int]) -> None:
    whole = parse([text])
    assert parse(split(text, cuts)) == whole
    if not any(marker in text for marker in HY3_MARKERS):
        assert whole == (text, "", [])


def test_a_prompt_that_opened_the_block_begins_with_reasoning() -> None:
    assert parse(["think", "ing</thi", "nk>\n\nanswer"], (), reasoning=True) == ("answer", "thinking", [])
    assert thinks_already("…<｜hy_Assistant｜><think>\n")
    assert thinks_already("…<think:opensource>")
    assert not thinks_already("…<think></think>")


def test_without_tools_their_markers_are_text() -> None:
    assert parse([CALLS], ())[0] == CALLS


def test_an_answer_cut_in_the_middle_of_a_call_keeps_what_is_certain() -> None:
    cut = CALLS[: CALLS.index("true")]
    _, _, calls = parse(list(cut))
    assert calls[0][1] == '{"city": "Köln \\"am\\" Rhein", "days": 3'


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "string"}, "7"),
        ("7", {"type": "integer"}, 7),
        ("7.0", {"type": "integer"}, "7.0"),
        ("7", {"type": "number"}, 7),
        ("True", {"type": "boolean"}, True),
        ("maybe", {"type": "boolean"}, "maybe"),
        ("[1]", {"type": "array"}, [1]),
        ("null", {"type": ["null", "string"]}, None),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ('{"a": 1}', None, {"a": 1}),
        ("NaN", None, "NaN"),
        ("false", {}, False),
        ("plain", {}, "plain"),
    ],
)
def test_values_are_typed_by_the_schema(text: str, schema: object, value: object) -> None:
    found = typed_value(text, schema)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1.10", {"$ref": "#/$defs/version"}, "1.10"),
        ("1.10", {"$ref": "#/properties/own"}, "1.10"),
        ("1.10", {"allOf": [{"$ref": "#/$defs/version"}]}, "1.10"),
        ("7", {"anyOf": [{"$ref": "#/$defs/version"}, {"type": "null"}]}, "7"),
        ("7", {"$ref": "#/$defs/nowhere"}, 7),
        ("7", {"$ref": "#/$defs/round"}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("true", {"const": "true"}, "true"),
        ("7", {"enum": [7, 8]}, 7),
        ("7", {"anyOf": [{"enum": ["7"]}, {}]}, 7),
        ("7", {"type": "string", "anyOf": [{"format": "date"}, {"minLength": 1}]}, "7"),
    ],
)
def test_a_value_is_typed_by_what_its_schema_refers_to(text: str, schema: object, value: object) -> None:
    root = {
        "properties": {"own": {"type": "string"}},
        "$defs": {"version": {"type": "string"}, "round": {"anyOf": [{"$ref": "#/$defs/round"}] * 3}},
    }
    found = typed_value(text, schema, root)
    assert (found, type(found)) == (value, type(value))
