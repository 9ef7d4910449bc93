"""Tool calls: is what the model emits a valid call for the schema it was given, and is it the one asked for?"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from katydid_cli.evaluation.figures import Figure, Item, estimate
from katydid_cli.evaluation.recall import evaluation_words
from katydid_cli.evaluation.scorer import Scorer
from katydid_cli.evaluation.text import ModelText
from katydid_cli.evaluation.tool_schemas import ToolCase, make_case

LONGEST_CALL = 192  # tokens
_CALL = re.compile(
    r"<tool_calls>\s*<tool_call>(?P<name>[^<]*)<tool_sep>(?P<body>.*?)</tool_call>\s*</tool_calls>", re.S
)
_ARGUMENT = re.compile(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.S)


def parse_call(text: str) -> tuple[str, dict[str, str]] | None:
    """Name and arguments (as text) of the one call in `text`, or None where it is not exactly one well-formed call."""
    match = _CALL.fullmatch(text.strip())
    if match is None:
        return None
    arguments: dict[str, str] = {}
    at, body = 0, match["body"].strip()
    while at < len(body):
        found = _ARGUMENT.match(body, at)
        if found is None or found["key"] in arguments:
            return None
        arguments[found["key"]] = found["value"]
        at = found.end()
    return match["name"].strip(), arguments


def fits(kind: dict[str, Any], value: str) -> bool:
    """Whether the text `value` is allowed by a property's schema (string, integer, number, boolean, enum)."""
    if "enum" in kind:
        return value in kind["enum"]
    if kind["type"] == "string":
        return True
    try:
        parsed = json.loads(value)
    except ValueError:
        return False
    if kind["type"] == "boolean":
        return isinstance(parsed, bool)
    allowed = (int,) if kind["type"] == "integer" else (int, float)
    return isinstance(parsed, allowed) and not isinstance(parsed, bool)


def is_valid(call: tuple[str, dict[str, str]] | None, tools: list[dict[str, Any]]) -> bool:
    """Whether the call names an offered tool, gives all required arguments, no unknown ones, and values that fit."""
    if call is None:
        return False
    name, arguments = call
    for tool in tools:
        if tool["function"]["name"] == name:
            spec = tool["function"]["parameters"]
            known = spec["properties"]
            return set(spec["required"]) <= set(arguments) and all(
                k in known and fits(known[k], v) for k, v in arguments.items()
            )
    return False


def answer(scorer: Scorer, text: ModelText, case: ToolCase) -> tuple[str, dict[str, str]] | None:
    """The model's call for a case."""
    prompt = text.chat([{"role": "user", "content": case.request}], case.tools)
    return parse_call(text.decode(scorer.generate(prompt, LONGEST_CALL, (text.eos,)).ids))


def tool_calls(scorer: Scorer, text: ModelText, cases: int) -> list[Figure]:
    """`tools.valid_rate` and `tools.exact_rate` over `cases` schemas."""
    words = evaluation_words()
    valid: list[Item] = []
    exact: list[Item] = []
    for n in range(cases):
        case = make_case(random.Random(f"tools/{n}"), words)
        call = answer(scorer, text, case)
        valid.append(Item(is_valid(call, case.tools), 1))
        exact.append(Item(call == (case.name, case.arguments), 1))
    return [
        estimate("tools.valid_rate", valid, "share", "higher"),
        estimate("tools.exact_rate", exact, "share", "higher"),
    ]
