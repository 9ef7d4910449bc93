"""Tool arguments that a model wrote as bare text, typed by the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from katydid_gateway.parsers.schema_parts import alternatives

__all__ = ["declared_types", "json_text", "typed_value"]

_ORDER = ("boolean", "integer", "number", "array", "object", "null", "string")


def typed_value(text: str, schema: object, root: object = None) -> Any:
    """`text` as the first type of its schema that it can be, in the order boolean, integer, number, JSON, string.

    Without a declared type every one is tried; text that fits none stays a string, so nothing the model wrote is lost.
    References lead into `root`.
    """
    declared = declared_types(schema, root)
    for kind in _ORDER:
        if not declared or kind in declared:
            matched, value = _as(kind, text)
            if matched:
                return value
    return text


def json_text(value: Any) -> str:
    """The value as JSON, readable where UTF-8 can say it: half a surrogate pair, which JSON can escape, it cannot."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def declared_types(schema: object, root: object = None) -> set[str]:
    """Those that the schema names, or that its constants have; none where any will do."""
    types: set[str] = set()
    for alternative in alternatives(schema, root):
        found = _types_of(alternative)
        if not found:
            return set()
        types |= found
    return types


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    if isinstance(kind := schema.get("type"), str):
        return {kind}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return set()
    return {next(kind for kind in _ORDER if _IS[kind](value)) for value in values}


def _as(kind: str, text: str) -> tuple[bool, Any]:
    if kind == "string":
        return True, text
    if kind == "boolean":
        lowered = text.strip().lower()
        return lowered in ("true", "false"), lowered == "true"
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False, None
    return _IS[kind](value), value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_IS = {
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
