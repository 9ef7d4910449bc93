"""Schemas: what is refused is named with its place, what is rewritten is no wider than it was."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
from typing import Any

import jsonschema
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine import json_schema_rules as rules
from katydid_engine.json_schema_rules import SchemaError, enforceable
from katydid_runtime.request_limits import MAX_JSON_WHITESPACE


def rewritten(schema: Any) -> Any:
    return json.loads(enforceable(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ("{", "no JSON"),
        ("3", "# is 3"),
        ('{"properties": []}', "#/properties is [], expected an object"),
        ('{"anyOf": {}}', "#/anyOf is {}, expected an array"),
        ('{"oneOf": 1}', "#/oneOf is 1, expected an array"),
        ('{"type": ["string", {}]}', "#/type is {}, expected one of string"),
        ('{"required": ["a", {"b": 1}]}', "#/required is"),
        ('{"type": "string", "enum": true}', "#/enum is true, expected an array"),
        ('{"type": "string", "pattern": 1}', "#/pattern is 1, expected a string"),
        ('{"type": "object", "patternProperties": ["a"]}', "#/patternProperties is"),
        ('{"type": "objec"}', '#/type is "objec"'),
        ('{"properties": {"a/b": {"not": {}}}}', "#/properties/a~1b/not cannot"),
        ('{"items": {"uniqueItems": true}}', "#/items/uniqueItems cannot"),
        ('{"type": "object", "if": {}, "then": {}}', "#/if cannot"),
        ('{"allOf": [{}, {}]}', "#/allOf of more than one"),
        ('{"allOf": [{}], "minimum": 3}', "#/allOf cannot be enforced together with minimum"),
        ('{"$ref": "#/$defs/a", "minimum": 3}', "#/$ref cannot be enforced together with minimum"),
        ('{"$ref": "http://other/schema"}', "#/$ref is"),
        ('{"minimum": 3}', "#/minimum cannot be enforced without type number"),
        ('{"type": "string", "pattern": "a", "maxLength": 3}', "#/pattern cannot be enforced together"),
        ('{"type": "string", "pattern": "\\""}', "#/pattern cannot be enforced with quotes"),
        ('{"type": "string", "pattern": "(?=a)b"}', "#/pattern: a lookahead"),
        ('{"type": "string", "pattern": "a^b"}', "#/pattern: ^ at character 1"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "#/oneOf cannot"),
        ('{"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"const": 1}}}', "#/oneOf cannot"),
        ('{"oneOf": [{"$ref": "#/$defs/a"}, {"const": 1}], "$defs": {"a": {"$ref": "#/$defs/a"}}}', "#/oneOf cannot"),
        ('{"oneOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}', "#/oneOf cannot"),
        ('{"type": "string", "enum": [1]}', "#/enum has no value"),
        ('{"type": "array", "minItems": -5}', "#/minItems is -5"),
        ('{"type": "array", "maxItems": 1.5}', "#/maxItems is 1.5"),
        ('{"type": "array", "minItems": 3, "maxItems": 2}', "#/minItems is above maxItems"),
        ('{"type": "string", "minLength": "2"}', '#/minLength is "2"'),
        ('{"type": "object", "maxProperties": true}', "#/maxProperties is true"),
        ('{"type": "number", "minimum": "0"}', '#/minimum is "0"'),
        ('{"type": "number", "maximum": Infinity}', "#/maximum is Infinity"),
        ('{"type": "integer", "multipleOf": 0}', "#/multipleOf is 0"),
        ('{"type": "number", "multipleOf": 2}', "#/multipleOf cannot be enforced but of integers"),
        ('{"type": "integer", "multipleOf": 0.5}', "#/multipleOf cannot be enforced but of integers"),
        ('{"type": "integer", "multipleOf": 5, "exclusiveMinimum": 3}', "#/multipleOf cannot be enforced but of"),
        ('{"type": "object", "propertyNames": {}, "properties": {}}', "#/propertyNames cannot be enforced together"),
        ('{"type": "object", "propertyNames": {}, "required": ["a"]}', "#/propertyNames cannot be enforced together"),
        (
            '{"type": "object", "propertyNames": {}, "additionalProperties": false}',
            "together with additionalProperties",
        ),
        ('{"patternProperties": {"^x": {}}, "required": ["a"]}', "#/patternProperties cannot be enforced together"),
        ('{"patternProperties": {"^x": {}}, "properties": {"ax": {}, "xa": {}}}', 'for "xa" of properties'),
        ('{"patternProperties": {"(": {}}}', '#/patternProperties: "("'),
        ('{"patternProperties": {"a{99999999999}": {}}}', '#/patternProperties: "a{'),
        pytest.param(
            f'{{"patternProperties": {{"{2000 * "("}{2000 * ")"}": {{}}}}}}', '#/patternProperties: "((', id="deep"
        ),
        ('{"type": "object", "additionalProperties": {}, "minProperties": 2}', "#/minProperties above 1 cannot"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: str, named: str) -> None:
    with pytest.raises(SchemaError) as caught:
        enforceable(schema)
    assert str(caught.value).startswith(named) or named in str(caught.value)


def test_nesting_has_an_end() -> None:
    schema: Any = {}
    for _ in range(101):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match="nested deeper"):
        rewritten(schema)
    with pytest.raises(SchemaError):
        enforceable('{"items":' * 50_000 + "{}" + "}" * 50_000)


def test_rewriting() -> None:
    assert rewritten({"type": "array", "minItems": 1}) == {"type": "array", "minItems": 1, "items": {}}
    assert rewritten({"required": ["a"]}) == {"required": ["a"], "properties": {"a": {}}}
    closed = {"required": ["a", "b"], "properties": {"a": True}, "additionalProperties": {"type": "null"}}
    assert rewritten(closed)["properties"] == {"a": {}, "b": {"type": "null"}}
    assert rewritten({"type": "integer", "enum": [1, "a", True, 2]}) == {"enum": [1, 2]}
    assert rewritten({"type": "string", "minLength": 2.0}) == rewritten({"type": "string", "minLength": 2})
    bounded = rewritten({"type": "string", "minLength": 2, "maxLength": 3})
    assert bounded["type"] == "string"
    assert bounded["pattern"].endswith("{2,3}$")
    assert not bounded.keys() & {"minLength", "maxLength"}


def test_everything_else_stays() -> None:
    schema = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "~/": {}}}},
        "title": "Tree",
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]},
            {"type": "array", "items": {"type": "string", "format": "uuid"}},
            {"type": "null"},
        ],
    }
    assert rewritten(schema) == schema
    assert rewritten({"type": "object", "properties": {}}) == {"type": "object", "properties": {}}


CHARACTERS = [*map(chr, range(32, 127)), "\n", "é", "</s>"]
END = len(CHARACTERS) - 1


def drawn(schema: Any, chance: random.Random) -> str:
    """A text that the schema's grammar takes, drawn character by character; quotes and brackets come early."""
    matcher = xgrammar.GrammarMatcher(compiled(json.dumps(schema)))
    mask, text = torch.zeros(1, -(-len(CHARACTERS) // 32), dtype=torch.int32), ""
    while True:
        matcher.fill_next_token_bitmask(mask)
        allowed = [token for token in range(END + 1) if int(mask[0, token // 32]) >> token % 32 & 1]
        if END in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return text
        closing = [token for token in allowed if CHARACTERS[token] in '"}],:']
        token = chance.choice(closing if closing and chance.random() < len(text) / 60 else allowed)
        if token == END:
            return text
        text += CHARACTERS[token]
        assert matcher.accept_token(token)


@functools.cache
def compiled(schema: str) -> xgrammar.CompiledGrammar:
    vocabulary = xgrammar.TokenizerInfo(CHARACTERS, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1)
    return compiler.compile_json_schema(enforceable(schema), max_whitespace_cnt=MAX_JSON_WHITESPACE)


INTEGER = {"type": "integer"}


def named(kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"$ref": f"#/$defs/~0{kind}"}, "n": INTEGER}, "required": ["kind"]}


# What Pydantic makes of a union that a field tells apart.
TOLD_APART = {
    "$defs": {"Cat": named("cat"), "Dog": named("dog"), "~cat": {"const": "cat"}, "~dog": {"enum": ["dog", "pup"]}},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 5},
        {"type": ["integer", "null"], "multipleOf": 3, "minimum": -4, "exclusiveMaximum": 30},
        {"type": "number", "exclusiveMinimum": -1.5, "maximum": 0.25},
        {"type": "string", "format": "date", "minLength": 1, "maxLength": 3},
        {"type": "string", "format": "uuid", "pattern": "^x+$"},
        {"type": "string", "pattern": "^[\\^b].$"},
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False},
        {"type": "array", "prefixItems": [INTEGER], "items": {"type": "null"}, "minItems": 2},
        {"type": "object", "propertyNames": {"pattern": "^[ab]{2}$"}, "maxProperties": 2},
        {"type": "object", "patternProperties": {"^x": INTEGER}, "properties": {"a": {"type": "null"}}},
        {"type": "object", "properties": {"a": INTEGER, "b": {}}, "required": ["b"], "additionalProperties": False},
        {"type": "object", "properties": {"a": INTEGER}, "required": ["z"], "additionalProperties": {"type": "null"}},
        {"oneOf": [{"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}, {"type": "null"}]},
        TOLD_APART,
        {"enum": ['a"b', [1], None, -0.5]},
    ],
    ids=json.dumps,
)
def test_what_is_enforced_satisfies_what_was_sent(schema: Any) -> None:
    chance, checked = random.Random(1), jsonschema.Draft202012Validator(schema)
    for _ in range(25):
        checked.validate(json.loads(drawn(schema, chance)))


@pytest.mark.parametrize(("least", "most"), [(0, 3), (2, None), (3, 3), (1, 500)])
def test_a_text_of_bounded_length_may_hold_whatever_json_can_say(least: int, most: int | None) -> None:
    """Quotes, line ends and backslashes are escaped and count as one character."""
    schema = {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})
    for text in ("", "a", '"', "a\n", '\\"\t', "Köln", "🦗" * 3, "x" * 500, "x" * 501):
        fits = least <= len(text) and (most is None or len(text) <= most)
        for written in (json.dumps(text, ensure_ascii=False), json.dumps(text)):
            if "\\ud8" not in written:  # half of what has two escapes
                assert accepted(schema, written) is fits, written
    for broken in ('"a\tb"', '"a\nb"', '"a\\qb"', '"\\ud800x"', '"a"b"'):
        assert not accepted(schema, broken)


def accepted(schema: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(json.dumps(schema)))
    return bool(matcher.accept_string(text) and matcher.is_completed())


KEYWORDS = sorted(
    {*rules._MAPS, *rules._LISTS, *rules._SCHEMAS, *rules._TYPE_OF, "type", "required", "enum", "const", "$ref"}
)
ODD = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1.5,
        math.inf,
        "",
        "a",
        "string",
        "object",
        "#",
        "#/$defs/a",
        "(",
        [],
        {},
        [[]],
        [{}],
        ["a"],
        {"a": 1},
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        ODD, lambda inner: st.dictionaries(st.sampled_from(KEYWORDS), inner | st.lists(inner, max_size=2)), max_leaves=8
    )
)
def test_whatever_a_schema_is_made_of_it_is_taken_or_refused(schema: Any) -> None:
    with contextlib.suppress(SchemaError):
        json.loads(enforceable(json.dumps(schema)))
