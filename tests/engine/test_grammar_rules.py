"""Grammars as they are compiled: schemas, expressions and the schemas within tags are held to the rules."""

from __future__ import annotations

import json

import pytest
from katydid_engine.grammar import Grammar, GrammarError, GrammarKind
from katydid_engine.grammar_rules import ruled
from katydid_engine.json_schema_rules import enforceable


def test_each_kind_by_its_rules() -> None:
    assert ruled(Grammar(GrammarKind.JSON_SCHEMA, "true", (9,))) == Grammar(GrammarKind.JSON_SCHEMA, "{}", (9,))
    assert ruled(Grammar(GrammarKind.REGEX, "^a$")) == Grammar(GrammarKind.REGEX, "a")
    for kind, source in (
        (GrammarKind.EBNF, 'root ::= "a"'),
        (GrammarKind.CHOICE, "[]"),
        (GrammarKind.STRUCTURAL_TAG, "{"),
    ):
        assert ruled(Grammar(kind, source)) == Grammar(kind, source)
    for kind, source, why in (
        (GrammarKind.JSON_SCHEMA, '{"not": {}}', "#/not cannot"),
        (GrammarKind.REGEX, "a^", "character 1"),
    ):
        with pytest.raises(GrammarError, match=why):
            ruled(Grammar(kind, source))


def test_schemas_within_a_tag_are_held_to_the_same_rules_as_far_as_they_can_be() -> None:
    """The library's own lengths let raw control characters through: a call that was forced had arguments of no JSON."""
    short, unique = {"type": "string", "minLength": 1}, {"type": "array", "uniqueItems": True}
    parts = [{"type": "json_schema", "json_schema": schema} for schema in (short, unique, True)]
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "any_text"}, *parts]}}
    source = ruled(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))).source
    elements = [part.get("json_schema") for part in json.loads(source)["format"]["elements"]]
    assert elements == [None, json.loads(enforceable(json.dumps(short))), unique, {}]
