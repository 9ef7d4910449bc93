"""Holds a JSON schema to what is enforced token by token, so that every complete output satisfies it.

XGrammar passes over keywords it does not know how to enforce. Here those are refused by name, and what it reads too
narrowly or too widely is rewritten: arrays without `items` may hold anything, required properties that are not declared
may be anything, string lengths become patterns (its own would let raw control characters through), and `enum` keeps
what has the `type` beside it. `format` is an annotation, as the standard has it; where the library knows one it helps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from katydid_runtime.request_limits import MAX_GRAMMAR_DEPTH

from katydid_engine.regex_rules import RegexError, enforceable_regex

__all__ = ["SchemaError", "enforceable"]

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator",
     "$comment", "$schema", "$id", "$defs", "definitions")
)  # fmt: skip
_REFUSED = frozenset(
    ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
     "maxContains", "$dynamicRef", "$recursiveRef", "contentSchema")
)  # fmt: skip
# Keywords of one type bind nothing of another, which the library cannot express for values of any type.
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPE_OF = {
    **dict.fromkeys(_NUMERIC, ("integer", "number")),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("minProperties", "maxProperties", "propertyNames"), ("object",)),
}
# Counts: whole numbers from 0, the least not above the most.
_COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_SCHEMAS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
# Neither control characters, quote, backslash nor surrogates: a negated class would take in bytes that are no UTF-8.
_PLAIN = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
# Or one that is escaped, which counts as one all the same; of surrogates alone no text consists.
_CHARACTER = rf'(?:{_PLAIN}|\\["\\/bfnrt]|\\u(?:[0-9a-ce-f][0-9a-f]{{3}}|d[0-7][0-9a-f]{{2}}))'
# A pattern is matched against the text between the quotes, where these would have to be written as escapes.
_NEEDS_ESCAPE = re.compile(r'"|\\\\|\\[nrtfv]|\\x[01]|\\u00[01]|[\x00-\x1f]')
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}  # fmt: skip


_FORMS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_MAPS, lambda value: isinstance(value, dict), "an object"),
    ((*_LISTS, "enum"), lambda value: isinstance(value, list), "an array"),
    (("required",), lambda value: isinstance(value, list) and _strings(value) == value, "an array of strings"),
    (("pattern", "format"), lambda value: isinstance(value, str), "a string"),
)


class SchemaError(ValueError):
    """The schema is no JSON, no schema, or asks for what is not enforced; the message says what and where."""


def enforceable(source: str) -> str:
    """The schema as it is compiled: what satisfies it satisfies ``source``.

    Raises:
        SchemaError: see there.
    """
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"it is no JSON: {error}") from error
    return json.dumps(_rewritten(schema, "#", 0, schema))


def _rewritten(schema: Any, path: str, depth: int, root: Any) -> Any:
    if isinstance(schema, bool):
        return {} if schema else False
    if not isinstance(schema, dict):
        raise SchemaError(f"{path} is {json.dumps(schema)[:40]}, expected an object or a boolean")
    if depth > MAX_GRAMMAR_DEPTH:
        raise SchemaError(f"{path[:80]}... is nested deeper than {MAX_GRAMMAR_DEPTH} schemas")
    _check_forms(schema, path)
    _check(schema, path, root)
    result = {name: value for name, value in schema.items() if name not in _LISTS + _MAPS + _SCHEMAS}
    for name, place, part in _parts(schema, path):
        if name == "propertyNames" and isinstance(part, dict):
            part = {"type": "string", **part}
        done = _rewritten(part, place, depth + 1, root)
        if name in _SCHEMAS:
            result[name] = done
        elif name in _LISTS:
            result.setdefault(name, []).append(done)
        else:
            result.setdefault(name, {})[place.rpartition("/")[2].replace("~1", "/").replace("~0", "~")] = done
    for name in _MAPS:
        if name in schema and not schema[name]:
            result[name] = {}
    _widen(result)
    _keep_pattern(result, path)
    _limit_length(result)
    _keep_types(result, path)
    return result


def _parts(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    """Sub-schemas: keyword, JSON pointer, value."""
    for name in _SCHEMAS:
        if name in schema:
            yield name, f"{path}/{name}", schema[name]
    for name in _LISTS:
        for index, part in enumerate(schema.get(name, ())):
            yield name, f"{path}/{name}/{index}", part
    for name in _MAPS:
        for key, part in schema.get(name, {}).items():
            yield name, f"{path}/{name}/{key.replace('~', '~0').replace('/', '~1')}", part


def _check_forms(schema: dict[str, Any], path: str) -> None:
    for names, fits, expected in _FORMS:
        for name in names:
            if name in schema and not fits(schema[name]):
                raise SchemaError(f"{path}/{name} is {json.dumps(schema[name])[:40]}, expected {expected}")


def _check(schema: dict[str, Any], path: str, root: Any) -> None:
    refused = sorted(_REFUSED & schema.keys())
    if schema.get("uniqueItems"):
        refused.append("uniqueItems")
    if refused:
        raise SchemaError(f"{path}/{refused[0]} cannot be enforced")
    constraints = schema.keys() - _ANNOTATIONS
    for whole in ("$ref", "allOf", "anyOf", "oneOf", "const"):
        beside = sorted(constraints - {whole, "type"})
        if whole in schema and beside:
            raise SchemaError(f"{path}/{whole} cannot be enforced together with {beside[0]}")
    if len(schema.get("allOf", ())) > 1:
        raise SchemaError(f"{path}/allOf of more than one schema cannot be enforced")
    if len(schema.get("oneOf", ())) > 1 and not _disjoint(schema["oneOf"], root):
        raise SchemaError(f"{path}/oneOf cannot be enforced unless types or constants tell its schemas apart")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaError(f"{path}/$ref is {json.dumps(reference)[:60]}, expected a place in this schema (#/...)")
    types = _types(schema, path)
    for name, holders in _TYPE_OF.items():
        if name in schema and not (types and set(types) & set(holders)):
            raise SchemaError(f"{path}/{name} cannot be enforced without type {holders[-1]} beside it")
    _check_bounds(schema, path)
    _check_multiples(schema, types, path)
    _check_names(schema, path)
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        raise SchemaError(f"{path}/pattern cannot be enforced together with a length")
    if _NEEDS_ESCAPE.search(str(schema.get("pattern", ""))):
        raise SchemaError(f"{path}/pattern cannot be enforced with quotes, backslashes or control characters in it")


def _check_bounds(schema: dict[str, Any], path: str) -> None:
    for least, most in _COUNTS:
        for name in (least, most):
            if name in schema and not (_number(schema[name]) and schema[name] >= 0 and schema[name] % 1 == 0):
                raise SchemaError(f"{path}/{name} is {json.dumps(schema[name])[:40]}, expected a whole number from 0")
        if schema.get(least, 0) > schema.get(most, math.inf):
            raise SchemaError(f"{path}/{least} is above {most}")
    for name in _NUMERIC:
        if name in schema and not _number(schema[name]):
            raise SchemaError(f"{path}/{name} is {json.dumps(schema[name])[:40]}, expected a number")
    if schema.get("multipleOf", 1) <= 0:
        raise SchemaError(f"{path}/multipleOf is {schema['multipleOf']}, expected a number above 0")


def _check_multiples(schema: dict[str, Any], types: list[str], path: str) -> None:
    """The library counts multiples of whole numbers, between two bounds or without any."""
    if "multipleOf" not in schema:
        return
    least, most = ({name, f"exclusive{name.title()}"} & schema.keys() for name in ("minimum", "maximum"))
    if "number" in types or schema["multipleOf"] % 1 or bool(least) != bool(most):
        raise SchemaError(f"{path}/multipleOf cannot be enforced but of integers, with both bounds beside it or none")


def _check_names(schema: dict[str, Any], path: str) -> None:
    """Of what says which properties there are the library follows one alone."""
    if "propertyNames" in schema:
        others = {"properties", "patternProperties", "required"} & schema.keys()
        if schema.get("additionalProperties") is False:
            others.add("additionalProperties")
        if others:
            raise SchemaError(f"{path}/propertyNames cannot be enforced together with {min(others)}")
    for pattern in schema.get("patternProperties", ()):
        if "required" in schema:
            raise SchemaError(f"{path}/patternProperties cannot be enforced together with required")
        try:
            matches = re.compile(pattern).search
        except (re.error, OverflowError, RecursionError) as error:
            raise SchemaError(f"{path}/patternProperties: {json.dumps(pattern)[:60]}: {error}") from error
        both = next((name for name in schema.get("properties", ()) if matches(name)), None)
        if both is not None:
            raise SchemaError(f"{path}/patternProperties cannot be enforced for {json.dumps(both)[:60]} of properties")
    # Names that the schema does not list may come twice, and are counted twice.
    free = schema.keys() & {"patternProperties", "propertyNames"} or schema.get("additionalProperties", False)
    if free is not False and schema.get("minProperties", 0) > 1:
        raise SchemaError(f"{path}/minProperties above 1 cannot be enforced where names are free")


def _number(value: Any) -> bool:
    # json reads NaN and Infinity, which are no JSON.
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _types(schema: dict[str, Any], path: str) -> list[str]:
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    for name in types:
        if not isinstance(name, str) or name not in _PYTHON_TYPES:
            raise SchemaError(f"{path}/type is {json.dumps(name)[:40]}, expected one of {', '.join(_PYTHON_TYPES)}")
    return types


def _disjoint(schemas: Any, root: Any) -> bool:
    """Whether no value satisfies two of them, as far as types, constants and constant properties show."""
    kinds = [_marks(schema, root) for schema in schemas]
    pairs = ((a, b) for i, a in enumerate(kinds) for b in kinds[:i])
    return all(any(not (a[key] & b[key]) for key in a.keys() & b.keys()) for a, b in pairs)


def _marks(schema: Any, root: Any) -> dict[str, frozenset[str]]:
    """What a value must be one of: its type (under ""), itself ("="), and required properties by name.

    A reference may lead to what is no schema: it says nothing here, and is refused where it is used as one.
    """
    schema = _referred(schema, root)
    if not isinstance(schema, dict):
        return {}
    marks: dict[str, frozenset[str]] = {}
    types = schema.get("type", [])
    if types := _strings(types if isinstance(types, list) else [types]):
        # An integer is a number too.
        marks[""] = frozenset("number" if name == "integer" else name for name in types)
    if (own := _constants(schema)) is not None:
        marks["="] = own
    properties = schema.get("properties", {})
    if marks.get("") == frozenset(("object",)) and isinstance(properties, dict):
        for name in _strings(schema.get("required")):
            if (values := _constants(_referred(properties.get(name), root))) is not None:
                marks[f".{name}"] = values
    return marks


def _referred(schema: Any, root: Any) -> Any:
    """What a chain of references leads to; None where it leads nowhere, or round in a circle."""
    for _ in range(MAX_GRAMMAR_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        place, schema = schema["$ref"], root
        for step in str(place).split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return None


def _constants(schema: Any) -> frozenset[str] | None:
    if not isinstance(schema, dict) or not schema.keys() & {"const", "enum"}:
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return frozenset(json.dumps(value, sort_keys=True) for value in values) if isinstance(values, list) else None


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _widen(schema: dict[str, Any]) -> None:
    """In place: arrays without items hold anything; required properties are declared ones."""
    types = schema.get("type")
    if "unevaluatedItems" not in schema and (types == "array" or (isinstance(types, list) and "array" in types)):
        schema.setdefault("items", {})
    if "required" in schema:
        schema["required"] = list(dict.fromkeys(schema["required"]))
        others = schema.get("additionalProperties", {})
        properties = schema.setdefault("properties", {})
        for name in schema["required"]:
            if "patternProperties" not in schema:
                properties.setdefault(name, others)


def _keep_pattern(schema: dict[str, Any], path: str) -> None:
    if "pattern" in schema:
        try:
            schema["pattern"] = enforceable_regex(schema["pattern"])
        except RegexError as error:
            raise SchemaError(f"{path}/pattern: {error}") from error


def _limit_length(schema: dict[str, Any]) -> None:
    if "minLength" in schema or "maxLength" in schema:
        least, most = int(schema.pop("minLength", 0)), schema.pop("maxLength", None)
        schema["pattern"] = f"^{_CHARACTER}{{{least},{'' if most is None else int(most)}}}$"
    if "pattern" in schema:
        schema.pop("format", None)  # of the two the library would follow it alone


def _keep_types(schema: dict[str, Any], path: str) -> None:
    """In place: of ``enum``, what has one of the types beside it; the types themselves are then said."""
    if "enum" not in schema or "type" not in schema:
        return
    kinds = [kind for name in _types(schema, path) for kind in _PYTHON_TYPES[name]]
    kept = [value for value in schema["enum"] if type(value) in kinds]
    if not kept:
        raise SchemaError(f"{path}/enum has no value of the type beside it")
    schema["enum"] = kept
    del schema["type"]
