"""What a value in a tool's schema may be, for whoever enforces values and whoever types them: references are followed,
unions and lists of types taken apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

__all__ = ["alternatives"]

# What a union may say of all its parts.
_OF_ALL = ("type", "properties", "required", "additionalProperties", "items")


def alternatives(schema: object, root: object) -> list[Mapping[str, Any]]:
    """The schemas of which a value satisfies one, none of them a reference, a union or with several types; `{}` is one
    that says nothing. References are followed in `root`, each of them once."""
    found: list[Mapping[str, Any]] = []
    followed: set[str] = set()
    waiting = deque([schema])
    while waiting:
        each = waiting.popleft()
        if not isinstance(each, Mapping):
            found.append({})
        elif isinstance(reference := each.get("$ref"), str):
            if reference not in followed:
                followed.add(reference)
                waiting.appendleft(_referred(reference, root))
        elif parts := _parts(each):
            waiting.extendleft(reversed(parts))
        else:
            found.append(each)
    return found or [{}]


def _parts(schema: Mapping[str, Any]) -> list[object]:
    """Of a union or of several types, else none."""
    for union in ("anyOf", "oneOf", "allOf"):
        options = schema.get(union)
        if isinstance(options, list) and (union != "allOf" or len(options) == 1):
            of_all = {name: schema[name] for name in _OF_ALL if name in schema}
            return [{**of_all, **option} if isinstance(option, Mapping) else option for option in options]
    kinds = schema.get("type")
    return [{**schema, "type": kind} for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []


def _referred(reference: str, root: object) -> object:
    """What a JSON pointer within the schema leads to; None where it leads nowhere."""
    start, *steps = reference.split("/")
    found = root if start == "#" else None
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found
