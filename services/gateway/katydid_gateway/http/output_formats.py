"""Every spelling of a constrained output: OpenAI's response_format, and what clients of other open servers send."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal, Protocol

import msgspec
from katydid_runtime.errors import InvalidRequestError

from katydid_gateway.requests import OutputFormat

__all__ = ["JsonSchemaFormat", "ResponseFormatBody", "StructuredOutputs", "output_format"]

_ANY_OBJECT = '{"type": "object"}'


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormatBody(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`; the kinds from regex on are additions to OpenAI's."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    pattern: str | None = None
    grammar: str | None = None
    choices: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's `structured_outputs`: one of them."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class _Body(Protocol):
    response_format: ResponseFormatBody | None
    structured_outputs: StructuredOutputs | None
    guided_json: dict[str, Any] | bool | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def output_format(body: _Body) -> OutputFormat | None:
    """The constraint that a body asks for. Raises InvalidRequestError for two of them, or half of one."""
    other = body.structured_outputs or StructuredOutputs()
    given = {
        "response_format": _response_format(body.response_format),
        "structured_outputs.json": _schema(other.json),
        "structured_outputs.regex": _source("regex", other.regex),
        "structured_outputs.choice": _choice(other.choice),
        "structured_outputs.grammar": _source("ebnf", other.grammar),
        "structured_outputs.json_object": OutputFormat("json_schema", _ANY_OBJECT) if other.json_object else None,
        "structured_outputs.structural_tag": _tag(other.structural_tag),
        "guided_json": _schema(body.guided_json),
        "guided_regex": _source("regex", body.guided_regex),
        "guided_choice": _choice(body.guided_choice),
        "guided_grammar": _source("ebnf", body.guided_grammar),
    }
    found = {name: format for name, format in given.items() if format is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequestError(f"{first} and {second} exclude each other", field=second, allowed="one of them")
    for name, format in found.items():
        return format if name == "response_format" else replace(format, field=name)
    return None


def _response_format(body: ResponseFormatBody | None) -> OutputFormat | None:
    if body is None or body.type == "text":
        return None
    match body.type:
        case "json_object":
            return OutputFormat("json_schema", _ANY_OBJECT)
        case "json_schema":
            schema = body.json_schema
            return _needed(body, "json_schema", None if schema is None else _schema(schema.schema), ".schema")
        case "regex":
            return _needed(body, "pattern", _source("regex", body.pattern))
        case "grammar":
            return _needed(body, "grammar", _source("ebnf", body.grammar))
        case "choice":
            return _needed(body, "choices", _choice(body.choices))
    tag = None if body.format is None else _tag({"type": "structural_tag", "format": body.format})
    return _needed(body, "format", tag)


def _needed(body: ResponseFormatBody, part: str, format: OutputFormat | None, within: str = "") -> OutputFormat:
    if format is None:
        raise InvalidRequestError(
            f"response_format of type {body.type} needs {part}", field=f"response_format.{part}", allowed="a value"
        )
    return replace(format, field=f"response_format.{part}{within}")


def _schema(schema: dict[str, Any] | bool | str | None) -> OutputFormat | None:
    if schema is None:
        return None
    return OutputFormat("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _source(kind: str, source: str | None) -> OutputFormat | None:
    return None if source is None else OutputFormat(kind, source)


def _choice(choices: list[str] | None) -> OutputFormat | None:
    return None if choices is None else OutputFormat("choice", choices=tuple(choices))


def _tag(tag: str | dict[str, Any] | None) -> OutputFormat | None:
    if tag is None:
        return None
    return OutputFormat("structural_tag", tag if isinstance(tag, str) else json.dumps(tag))
