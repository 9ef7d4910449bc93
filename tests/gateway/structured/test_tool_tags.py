"""Forced calls: the grammar library takes what each family's parser reads back, and refuses what it must."""

from __future__ import annotations

import json
from typing import Any

import pytest
from katydid_gateway.parsers.choice import output_parser
from katydid_gateway.requests import Tool
from katydid_gateway.structured.tool_tags import as_format, calls_format
from katydid_runtime.errors import InvalidRequestError

xgrammar = pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "zip": {"type": ["string", "null"]},
        "from": {"$ref": "#/properties/city"},
        "either": {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/place"}]},
        "size": {"enum": ["a", 2, None]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/place"}},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = (Tool("weather", "w", SCHEMA), Tool("now"), Tool("open", "o", {"type": "object"}))
CALL = {"city": "Köln am <Rhein>", "days": 3, "unit": "C", "where": {"x": 1.5}}
NULLABLE = {
    "city": "P",
    "note": "it's 1.10",
    "zip": "50667",
    "from": "1.10",
    "either": {"x": 2},
    "size": "a",
    "stops": [],
}
OTHERS = {"city": "P", "note": None, "zip": None, "from": "true", "either": 7, "size": 2, "stops": [{"x": 1}]}


def accepts(format: dict[str, Any], text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    tag = json.dumps({"type": "structural_tag", "format": format})
    return bool(_is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(tag), text))


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def llama(name: str, arguments: dict[str, Any]) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'


def hy3(name: str, arguments: dict[str, Any], suffix: str = "") -> str:
    def value(given: Any) -> str:
        return given if isinstance(given, str) else json.dumps(given)

    body = "".join(
        f"<arg_key{suffix}>{key}</arg_key{suffix}>\n<arg_value{suffix}>{value(given)}</arg_value{suffix}>\n"
        for key, given in arguments.items()
    )
    return f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n{body}</tool_call{suffix}>"


def whole(family: str, calls: list[str]) -> str:
    if family.startswith("hy3"):
        suffix = ":opensource" if family == "hy3s" else ""
        return f"<tool_calls{suffix}>\n" + "\n".join(calls) + f"\n</tool_calls{suffix}>"
    return ("; " if family == "llama" else "\n").join(calls)


WRITERS = {"hermes": hermes, "llama": llama, "hy3": hy3, "hy3s": lambda name, given: hy3(name, given, ":opensource")}


@pytest.mark.parametrize("family", WRITERS)
def test_what_is_forced_reads_back(family: str) -> None:
    write, kind = WRITERS[family], family.removesuffix("s") if family == "hy3s" else family
    format = calls_format(kind, TOOLS, several=True, suffixed=family == "hy3s")
    assert format is not None
    calls = [
        *(("weather", CALL), ("now", {}), ("weather", {"city": "Paris"}), ("weather", NULLABLE), ("weather", OTHERS)),
        *(("weather", {"city": "P", "size": None}), ("open", {"x": 1, "what": "ever"}), ("open", {})),
    ]
    text = whole(family, [write(name, given) for name, given in calls])
    assert accepts(format, text), text
    parser = output_parser(kind, TOOLS, "")
    parsed = parser.feed(text)
    rest = parser.finish()
    read: dict[int, list[str]] = {}
    for part in (*parsed.tool_calls, *rest.tool_calls):
        names = read.setdefault(part.index, ["", ""])
        names[0] += part.name
        names[1] += part.arguments
    assert [(name, json.loads(given)) for name, given in read.values()] == calls
    assert not (parsed.content + rest.content).strip()


@pytest.mark.parametrize("family", WRITERS)
def test_what_is_no_such_call_is_refused(family: str) -> None:
    write, kind = WRITERS[family], "hy3" if family == "hy3s" else family
    one = calls_format(kind, TOOLS, several=False, suffixed=family == "hy3s")
    assert one is not None
    good = write("weather", {"city": "Paris"})
    assert accepts(one, whole(family, [good]))
    wrong = [
        [write("other", {})],
        [write("weather", {"days": 3})],
        [write("weather", {"city": "P", "days": "x"})],
        [write("weather", {"city": "P", "either": "x"})],
        [write("weather", {"city": "P", "size": "3"})],
        [write("weather", {"city": "P", "stops": [{"x": "1"}]})],
        [good, good],
    ]
    for calls in wrong:
        assert not accepts(one, whole(family, calls)), calls
    for text in ("", "hello", f"hello {whole(family, [good])}"):
        assert not accepts(one, text)
    nested = whole(family, [write("weather", {"city": "Paris", "where": {"x": 1}})])
    for blanks in range(3):
        assert accepts(one, nested.replace('"x": 1', f'"x":{blanks * " "}1')) is (blanks < 2), "blanks have no end"


def test_what_a_union_says_of_all_its_parts_holds() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "anyOf": [{"required": ["x"]}, {}]}
    one = calls_format("hy3", [Tool("go", "", {"properties": {"at": point}})], several=False, suffixed=False)
    assert one is not None
    for at, fits in (({"x": 1}, True), ({}, True), ("anything", False), ({"x": "1"}, False)):
        assert accepts(one, whole("hy3", [hy3("go", {"at": at})])) is fits, at


def test_other_constraints_within_a_tag() -> None:
    either = {
        "type": "or",
        "elements": [as_format("json_schema", '{"type": "object"}', ()), as_format("choice", "", ("yes", "no"))],
    }
    assert accepts(either, "yes")
    assert accepts(either, '{"a": 1}')
    assert not accepts(either, "perhaps")
    assert accepts(as_format("regex", "[ab]+", ()), "abba")
    assert accepts(as_format("ebnf", 'root ::= "x"', ()), "x")
    assert as_format("structural_tag", '{"format": {"type": "any_text"}}', ()) == {"type": "any_text"}
    assert calls_format("none", TOOLS, several=True, suffixed=False) is None


@pytest.mark.parametrize("family", ["hermes", "llama", "hy3"])
@pytest.mark.parametrize("required", [[{}], [["a"]], {"a": 1}, 3])
def test_a_schema_of_another_form_is_the_engines_to_refuse(family: str, required: object) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": ["string", {}]}}, "required": required})
    assert calls_format(family, [tool], several=False, suffixed=False) is not None


def test_schemas_that_would_fill_the_memory_are_refused() -> None:
    """A part takes the whole along for its references, so a schema has the square of its length at most."""
    part = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}
    several = {"type": "object", "properties": {f"p{i}": part for i in range(3000)}, "$defs": {"a": {"type": "string"}}}
    with pytest.raises(InvalidRequestError, match="characters") as caught:
        calls_format("hy3", [Tool("f", "", several)], several=False, suffixed=False)
    assert caught.value.field == "tools"
    with pytest.raises(InvalidRequestError, match="the tools' schemas have"):
        calls_format("hermes", [Tool("f", "", {"description": "x" * 300_000})], several=False, suffixed=False)
    few = {**several, "properties": {f"p{i}": part for i in range(20)}}
    assert calls_format("hy3", [Tool("f", "", few)], several=False, suffixed=False) is not None
