"""A grammar as it is compiled: held to what is enforced token by token, or refused by name.

How long that takes is up to the grammar: a schema's patterns are tried on its names. It belongs where grammars are
tried, under their limits, and on nobody's event loop.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

from katydid_engine.grammar import Grammar, GrammarError, GrammarKind
from katydid_engine.json_schema_rules import SchemaError, enforceable
from katydid_engine.regex_rules import RegexError, enforceable_regex

__all__ = ["ruled"]


def ruled(grammar: Grammar) -> Grammar:
    """What satisfies the grammar returned satisfies ``grammar``. Raises GrammarError."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return replace(grammar, source=enforceable(grammar.source))
            case GrammarKind.REGEX:
                return replace(grammar, source=enforceable_regex(grammar.source))
            case GrammarKind.STRUCTURAL_TAG:
                return replace(grammar, source=_with_rules(grammar.source))
    except (SchemaError, RegexError) as error:
        raise GrammarError(str(error)) from error
    return grammar


def _with_rules(tag: str) -> str:
    """The schemas within a tag as they are compiled. One that cannot be enforced in full stays as it is: it is mostly a
    tool's, and tools check their arguments themselves."""
    try:
        whole = json.loads(tag)
    except (ValueError, RecursionError):
        return tag  # the compiler says what is wrong with it
    waiting = [whole]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict) and item.get("type") == "json_schema" and "json_schema" in item:
            with contextlib.suppress(SchemaError):
                item["json_schema"] = json.loads(enforceable(json.dumps(item["json_schema"])))
        elif isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
    return json.dumps(whole)
