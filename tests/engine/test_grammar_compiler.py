"""Compiled grammars: whatever a model prefers, a complete output satisfies what was asked for."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.grammar import Grammar, GrammarError, GrammarKind
from katydid_engine.json_schema_rules import enforceable
from tokenizers import Tokenizer

from tests.tiny_model import EOS_ID, VOCAB_SIZE, _tokenizer, write_tiny_model

pytest.importorskip("xgrammar")
from katydid_engine.grammar_compiler import GrammarCompiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def grammars(folder: Path) -> CompiledGrammars:
    return CompiledGrammars(folder, VOCAB_SIZE, (EOS_ID,))


def walk(grammars: CompiledGrammars, grammar: Grammar, seed: int, limit: int = 600) -> str | None:
    """Text of random allowed tokens, with a liking for closing brackets; None when it found no end."""
    chooser = random.Random(seed)
    state = grammars.begin(grammar, (EOS_ID,))
    output: list[int] = []
    while not state.ended:
        if len(output) == limit:
            return None
        tokens = np.flatnonzero(np.unpackbits(state.mask().numpy().view(np.uint8), bitorder="little"))
        closing = tokens[np.isin(tokens, CLOSING)]
        token = int(chooser.choice(closing if len(closing) and chooser.random() < 0.5 else tokens))
        assert state.accept(token)
        if token == EOS_ID:
            break
        output.append(token)
    text: str = tokenizer().decode(output)
    assert "\ufffd" not in text
    return text


@cache
def tokenizer() -> Tokenizer:
    return _tokenizer()


CLOSING = [*tokenizer().encode('"]}').ids, EOS_ID]


scalars = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, st.integers(-99, 99),
              st.integers(0, 500)),
    st.builds(lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size}, st.integers(0, 3),
              st.integers(0, 4)),
    st.sampled_from([{"type": "string"}, {"type": "number"}, {"type": "string", "pattern": "^[a-c]+-\\d{2}$"},
                     {"enum": ["é", 1, None, {"k": [1]}]}, {"const": "\"x\\\n"}, {"type": ["string", "null"]},
                     {"type": "string", "enum": ["a", 5, "b"]}, {"type": "string", "format": "uuid"}, {}, True]),
)  # fmt: skip


def containers(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
            schemas, st.integers(0, 2), st.integers(0, 2),
        ),
        st.builds(lambda first: {"type": "array", "prefixItems": first}, st.lists(schemas, min_size=1, max_size=2)),
        st.builds(
            lambda properties, more: {
                "type": "object", "properties": properties, "required": list({*list(properties)[::2], *more}),
                "additionalProperties": {"type": "boolean"},
            },
            st.dictionaries(st.sampled_from(["a", "b/c", "é~"]), schemas, max_size=3),
            st.lists(st.sampled_from(["zz", "a"]), unique=True, max_size=2),
        ),
        st.builds(lambda any_of: {"anyOf": any_of}, st.lists(schemas, min_size=1, max_size=3)),
    )  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=st.recursive(scalars, containers, max_leaves=5), seed=st.integers(0, 1000))
def test_every_complete_output_satisfies_its_schema(grammars: CompiledGrammars, schema: Any, seed: int) -> None:
    text = walk(grammars, Grammar(GrammarKind.JSON_SCHEMA, enforceable(json.dumps(schema))), seed)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("seed", range(5))
def test_json_by_a_schema_has_at_most_one_blank_between_tokens(grammars: CompiledGrammars, seed: int) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "b"}, "c": {"const": 1}}, "required": ["a", "c"]}
    text = walk(grammars, Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "additionalProperties": False})), seed)
    assert text is not None
    assert re.fullmatch(r"\s?".join(["", *re.findall(r'"a"|"b"|"c"|[{}:,1]', text), ""]), text), text


@pytest.mark.parametrize("seed", range(5))
def test_the_other_kinds(grammars: CompiledGrammars, seed: int) -> None:
    text = walk(grammars, Grammar(GrammarKind.REGEX, r"(a|bc)+\.\d{2,3}"), seed)
    assert text is not None
    assert re.fullmatch(r"(a|bc)+\.\d{2,3}", text)
    text = walk(grammars, Grammar(GrammarKind.EBNF, 'root ::= "(" root ")" | [a-c]'), seed)
    assert text is not None
    assert text.count("(") == text.count(")")
    choices = ["yes", "yes, but", "非"]
    assert walk(grammars, Grammar(GrammarKind.CHOICE, json.dumps(choices)), seed) in choices
    assert isinstance(json.loads(walk(grammars, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), 4) or ""), dict)


def test_special_tokens_come_in_structural_tags_alone(grammars: CompiledGrammars) -> None:
    (start,) = tokenizer().encode("<|im_start|>").ids
    content = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"n": {"type": "integer"}},
                                                      "required": ["n"]}}  # fmt: skip
    tag = {"type": "tag", "begin": "<|im_start|>call ", "content": content, "end": "."}
    source = json.dumps({"type": "structural_tag", "format": tag})
    state = grammars.begin(Grammar(GrammarKind.STRUCTURAL_TAG, source), (EOS_ID,))
    assert state.accept(start)
    for token in tokenizer().encode('call {"n": 3}.').ids:
        assert state.accept(token)
    assert state.ended
    text = grammars.begin(Grammar(GrammarKind.REGEX, ".*"), (EOS_ID,))
    assert not text.accept(start)


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        (GrammarKind.REGEX, "(a", "position 3: The parenthesis is not closed"),
        (GrammarKind.EBNF, "root ::= foo", 'Rule "foo" is not defined'),
        (GrammarKind.EBNF, 'x ::= "a"', "root"),
        (GrammarKind.EBNF, "root ::= root", "no text of this vocabulary"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/x"}', "Cannot find field"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}', "minimum greater"),
        (GrammarKind.JSON_SCHEMA, f'{{"type": "integer", "minimum": {10**400}}}', "cannot read it"),
        (GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "x"}}', "not recognized"),
        (GrammarKind.STRUCTURAL_TAG, "[]", ""),
    ],
)
def test_a_bad_grammar_is_told_why(folder: Path, kind: GrammarKind, source: str, why: str) -> None:
    with pytest.raises(GrammarError) as caught:
        GrammarCompiler(folder, VOCAB_SIZE, (EOS_ID,)).check(Grammar(kind, source))
    assert str(caught.value)
    assert why in str(caught.value)
    assert "/project/" not in str(caught.value)
