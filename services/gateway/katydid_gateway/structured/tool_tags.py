"""Calls of tools as each family writes them, for an engine to enforce: names that exist, arguments of their schemas.

A format is a dict of XGrammar's structural tags (Grammar.structural_tag of the engine's protocol). Each tag here reads
back through the parser of its family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from katydid_runtime.errors import InvalidRequestError
from katydid_runtime.request_limits import MAX_GRAMMAR_CHARACTERS, MAX_JSON_WHITESPACE

from katydid_gateway.parsers.hy3 import SUFFIX
from katydid_gateway.parsers.schema_parts import alternatives
from katydid_gateway.requests import Tool

__all__ = ["Format", "as_format", "calls_format"]

Format: TypeAlias = dict[str, Any]

_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
# Where a part of a schema keeps the whole, for its references.
_WHOLE = "whole"


def calls_format(family: str, tools: Sequence[Tool], *, several: bool, suffixed: bool) -> Format | None:
    """One call of one of `tools`, or `several`; None for a family whose calls are not known.

    `suffixed` is Hy3's second spelling of its markers. Raises InvalidRequestError for schemas longer than a grammar may
    be.
    """
    length = sum(len(json.dumps(tool.parameters)) for tool in tools)
    if length > MAX_GRAMMAR_CHARACTERS:
        raise _too_long(f"the tools' schemas have {length}")
    match family:
        case "hermes":
            return _separated([_hermes(tool) for tool in tools], "\n", several=several)
        case "llama":
            return _separated([_llama(tool) for tool in tools], "; ", several=several)
        case "hy3":
            spelled = _Hy3(SUFFIX if suffixed else "")
            calls = _separated([spelled.call(tool) for tool in tools], "\n", several=several)
            return _sequence(
                _text(spelled.opened("tool_calls") + "\n"), calls, _text("\n" + spelled.closed("tool_calls"))
            )
    return None


def as_format(kind: str, source: str, choices: Sequence[str]) -> Format:
    """A constraint of another kind as part of a structural tag."""
    match kind:
        case "json_schema":
            return _json(json.loads(source))
        case "regex":
            return {"type": "regex", "pattern": source}
        case "ebnf":
            return {"type": "grammar", "grammar": source}
        case "choice":
            return {"type": "or", "elements": [_text(choice) for choice in choices]}
    tag: Format = json.loads(source)["format"]
    return tag


def _hermes(tool: Tool) -> Format:
    begin = f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": '
    return _tag(begin, _json(_parameters(tool)), "}\n</tool_call>")


def _llama(tool: Tool) -> Format:
    return _tag(f'{{"name": {json.dumps(tool.name)}, "parameters": ', _json(_parameters(tool)), "}")


class _Hy3:
    """Tagged keys and values: the schema's properties in its order, those that are not required may be left out."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._copied = 0

    def opened(self, marker: str) -> str:
        return f"<{marker}{self._suffix}>"

    def closed(self, marker: str) -> str:
        return f"</{marker}{self._suffix}>"

    def call(self, tool: Tool) -> Format:
        schema = _parameters(tool)
        known = schema.get("properties")
        needed = schema.get("required")
        required = {name for name in needed if isinstance(name, str)} if isinstance(needed, list) else set()
        arguments = [
            argument if name in required else {"type": "optional", "content": argument}
            for name, value in (known.items() if isinstance(known, Mapping) else ())
            if (argument := self._argument(_text(name), self._bare(value, schema)))
        ]
        if known is None and schema.get("additionalProperties") is not False:
            any_name = {"type": "regex", "pattern": "[^<>\\n]+"}
            arguments = [{"type": "star", "content": self._argument(any_name, {"type": "any_text"})}]
        begin = f"{self.opened('tool_call')}{tool.name}{self.opened('tool_sep')}\n"
        content = _sequence(*arguments) if arguments else _text("")
        return _tag(begin, content, self.closed("tool_call"))

    def _argument(self, name: Format, value: Format) -> Format:
        return _sequence(
            _tag(self.opened("arg_key"), name, self.closed("arg_key") + "\n"),
            _tag(self.opened("arg_value"), value, self.closed("arg_value") + "\n"),
        )

    def _bare(self, schema: object, whole: Mapping[str, Any]) -> Format:
        """A value that is written without quotes when it is a string, and as JSON otherwise."""
        found = [self._bare_one(each, whole) for each in alternatives(schema, whole)]
        free = next((each for each in found if each["type"] == "any_text"), None)
        return free or (found[0] if len(found) == 1 else {"type": "or", "elements": found})

    def _bare_one(self, rules: Mapping[str, Any], whole: Mapping[str, Any]) -> Format:
        values = rules.get("enum", [rules["const"]] if "const" in rules else None)
        if isinstance(values, list) and values:
            texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
            return {"type": "or", "elements": [_text(text) for text in texts]}
        if rules.get("type") == "string" and isinstance(rules.get("pattern"), str):
            return {"type": "regex", "pattern": rules["pattern"]}
        if rules.get("type") in ("string", None) and "allOf" not in rules:
            return {"type": "any_text"}
        return _json(self._by_itself(rules, whole))

    def _by_itself(self, rules: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
        """A part of a schema as one of its own, whose references lead where they led in the whole."""
        source, reference = json.dumps(rules), '"$ref": "#'
        # Within a text the quotes would have backslashes.
        if reference not in source:
            return rules
        kept = json.dumps(whole)
        self._copied += len(kept)
        if self._copied > MAX_GRAMMAR_CHARACTERS:
            raise _too_long(f"parts of the tools' schemas refer to others, so that together they have {self._copied}")
        moved = f"{reference}/$defs/{_WHOLE}"
        own, defined = (json.loads(each.replace(reference, moved)) for each in (source, kept))
        return {**own, "$defs": {_WHOLE: defined}}


def _too_long(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what} characters", field="tools", allowed=f"at most {MAX_GRAMMAR_CHARACTERS} characters of forced calls"
    )


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return tool.parameters or _NO_ARGUMENTS


def _separated(tags: list[Format], separator: str, *, several: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _json(schema: Mapping[str, Any] | bool) -> Format:
    asked = schema if isinstance(schema, bool) else dict(schema)
    return {"type": "json_schema", "json_schema": asked, "max_whitespace_cnt": MAX_JSON_WHITESPACE}
