"""Calls as JSON objects, in Hermes' and in Llama's dress: against a plain reading of the whole text, at any split."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.parsers.choice import format_of
from katydid_gateway.parsers.interface import OutputParser
from katydid_gateway.parsers.json_calls import HermesParser, LlamaParser
from katydid_gateway.parsers.json_values import json_text, typed_value
from katydid_gateway.text.model_text import load_model_text

from tests.gateway.model_folders import tiny_tokenizer, write_folder

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3)
CALLS = st.tuples(st.sampled_from(["f", "get_weather", 'q"uote', "ü"]), ARGUMENTS)
WORDS = st.sampled_from(["", "I look it up.", "a < b", "x\n\ny", "<tool", "{not json", "; ", "ü🦗"])


def parse(parser: OutputParser, text: str, cuts: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, calls) of `text` fed in pieces of these lengths."""
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    pieces, start = [], 0
    for cut in [*cuts, len(text)]:
        pieces.append(text[start : start + cut])
        start += cut
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        content += parsed.content
        reasoning += parsed.reasoning
        for part in parsed.tool_calls:
            if part.id:
                calls[part.index] = [part.name, ""]
            calls[part.index][1] += part.arguments
    assert sorted(calls) == list(range(parser.calls))
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


def written(call: tuple[str, dict[str, Any]], style: int) -> str:
    """A call in one of the ways models write them."""
    name, arguments = call
    if style == 1:
        return json.dumps({"arguments": arguments, "name": name}, ensure_ascii=False, indent=1)
    if style == 2:
        return json.dumps({"name": name, "arguments": json.dumps(arguments)})
    return json.dumps({"name": name, "parameters" if style == 3 else "arguments": arguments})


@settings(deadline=None)
@given(WORDS, st.lists(CALLS, max_size=3), st.integers(0, 3), st.lists(st.integers(1, 9)), st.booleans())
def test_hermes(words: str, calls: list[Any], style: int, cuts: list[int], thinks: bool) -> None:
    dressed = "".join(f"\n<tool_call>\n{written(call, style)}\n</tool_call>" for call in calls)
    text = f"<think>\nhm\n</think>\n\n{words}{dressed}" if thinks else words + dressed
    content, reasoning, found = parse(HermesParser(tools=True), text, cuts)
    assert reasoning == ("hm" if thinks else "")
    # The words are what is left of the text without its calls, by a rule of its own.
    plain = re.sub(r"\s*<tool_call>.*?</tool_call>\s*", "", text, flags=re.DOTALL) if calls else text
    plain = re.sub(r"<think>.*</think>\s*", "", plain, flags=re.DOTALL)
    assert content == plain
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=3), st.integers(0, 3), st.booleans(), st.lists(st.integers(1, 9)))
def test_llama(calls: list[Any], style: int, tagged: bool, cuts: list[int]) -> None:
    text = "; ".join(written(call, style) for call in calls)
    content, _, found = parse(LlamaParser(tools=True), ("<|python_tag|>" if tagged else "\n") + text, cuts)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")
PIECES = st.sampled_from(
    (*MARKERS, "{", '"', "\\", "word", "; ", "}", "}}", '{"name": "f"', ', "arguments": {', '"a": "}"', " ", "\n")
)


@settings(deadline=None)
@given(st.lists(PIECES, max_size=12), st.lists(st.integers(1, 7)), st.booleans())
@pytest.mark.parametrize("family", [HermesParser, LlamaParser])
def test_any_text_is_the_same_at_any_split(family: Any, pieces: list[str], cuts: list[int], tools: bool) -> None:
    text = "".join(pieces)
    whole = parse(family(tools=tools), text, [])
    assert parse(family(tools=tools), text, cuts) == whole
    if not tools:
        assert whole[2] == []


@pytest.mark.parametrize("family", [HermesParser, LlamaParser])
def test_what_is_no_call_stays_text(family: Any) -> None:
    for text in ('{"a": 1}', "{", "<tool_call>{}</tool_call>", '<|python_tag|>print("hi")', "a <tool_call> b"):
        content, _, calls = parse(family(tools=True), text, [1] * len(text))
        assert calls == []
        assert set(re.sub(r"</?tool_call>|<\|python_tag\|>|\s", "", text)) <= set(content)


def test_arguments_come_while_they_are_written() -> None:
    parser = HermesParser(tools=True)
    first = parser.feed('<tool_call>{"name": "f", "arguments": {"path": "/a/b')
    assert first.tool_calls[0].name == "f"
    assert first.tool_calls[1].arguments == '{"path": "/a/b'


def test_the_format_is_known_by_the_template() -> None:
    assert format_of("{{ '<tool_call>' }}...<tool_sep>") == "hy3"
    assert format_of("return a json object within <tool_call></tool_call>") == "hermes"
    assert format_of("{{ '<|python_tag|>' }}") == "llama"
    assert format_of("<tool_call>\n<function=example>") == "none"
    assert format_of("{{ message.content }}") == "none"


@pytest.mark.parametrize(("template", "warned"), [("{{ tools }}<function=x>", True), ("{{ messages }}", False)])
def test_a_model_whose_calls_cannot_be_read_is_told_of_at_the_start(
    template: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path, tiny_tokenizer(["<eos>"]), template, {})
    assert load_model_text(folder).tool_format == "none"
    assert ("come back as text" in caplog.text) is warned


def test_half_a_surrogate_pair_never_leaves_as_text() -> None:
    said = '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>'
    content, _, calls = parse(HermesParser(tools=True), said, [])
    assert (content, calls) == (said, [])
    assert json_text({"ü": "\ud800"}).encode() == b'{"\\u00fc": "\\ud800"}'
    assert json_text({"ü": "🦗"}) == '{"ü": "🦗"}'


def test_odd_values_and_schemas_are_text() -> None:
    deep = "[" * 5000
    assert typed_value(deep, {}) == deep
    assert typed_value("5", {"anyOf": 5}) == 5
