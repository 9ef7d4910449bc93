"""The one constraint of an answer: its response format, the calls its caller forces, and where either begins.

Behind a block of reasoning that the prompt opened, the constraint begins with the block's end marker. With tools that
may be called freely, a response format holds for an answer that calls none.
"""

from __future__ import annotations

import json
from dataclasses import replace

from katydid_runtime.errors import InvalidRequestError
from katydid_runtime.request_limits import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_CHOICES, MAX_GRAMMAR_DEPTH

from katydid_gateway.parsers.hy3 import SUFFIX, thinks_already
from katydid_gateway.requests import Conversation, OutputFormat, Prompt
from katydid_gateway.structured.tool_tags import Format, as_format, calls_format
from katydid_gateway.text.model_text import ModelText

__all__ = ["check_format", "constraint"]

_TAG = "structural_tag"


def constraint(prompt: Prompt, asked: OutputFormat | None, text: ModelText, rendered: str) -> OutputFormat | None:
    """What the answer to `prompt`, which was rendered as `rendered`, must be; None when it may be anything.

    Raises InvalidRequestError where calls are forced and the model's way to write them is not known.
    """
    if asked is not None:
        check_format(asked)
    if not isinstance(prompt, Conversation):
        return asked
    choice = prompt.tool_choice
    forced = choice not in ("auto", "none")
    combined = asked
    if forced:
        if asked is not None:
            raise InvalidRequestError(
                "a forced call of a tool leaves no room for a response_format",
                field=asked.field,
                allowed="response_format with tool_choice auto or none",
            )
        combined = _tagged(_calls(prompt, text), "tools")
    elif asked is not None and prompt.tools and choice == "auto" and text.tool_format != "none":
        content = as_format(asked.kind, asked.source, asked.choices)
        combined = _tagged({"type": "or", "elements": [content, _calls(prompt, text)]}, asked.field)
    if combined is None or not thinks_already(rendered):
        return combined
    end = f"</think{SUFFIX}>" if rendered.rstrip().endswith(f"{SUFFIX}>") else "</think>"
    return replace(combined, begin_after=text.tokenizer.ids_of(end))


def check_format(asked: OutputFormat) -> None:
    """Sizes and depth, before anything is built of it. Raises InvalidRequestError."""
    most, name = MAX_GRAMMAR_CHARACTERS, asked.field

    def refused(problem: str, allowed: str) -> InvalidRequestError:
        return InvalidRequestError(f"{name} {problem}", field=name, allowed=allowed)

    if len(asked.source) > most or sum(map(len, asked.choices)) > most:
        raise refused(f"is longer than {most} characters", f"at most {most} characters")
    if asked.kind == "choice" and not 1 <= len(asked.choices) <= MAX_GRAMMAR_CHOICES:
        raise refused(f"has {len(asked.choices)} choices", f"1 to {MAX_GRAMMAR_CHOICES} choices")
    if not all(asked.choices):
        raise refused("has an empty choice", "texts that are not empty")
    if asked.kind in ("regex", "ebnf") and not asked.source:
        raise refused("is empty", "at least one character")
    if asked.kind not in ("json_schema", _TAG):
        return
    try:
        source = json.loads(asked.source)
    except (ValueError, RecursionError) as error:
        raise refused(f"holds no JSON: {error}", "JSON") from error
    if _depth(source) > MAX_GRAMMAR_DEPTH:
        raise refused(f"is nested more than {MAX_GRAMMAR_DEPTH} deep", f"at most {MAX_GRAMMAR_DEPTH} levels")
    if asked.kind == _TAG and not (isinstance(source, dict) and isinstance(source.get("format"), dict)):
        raise refused("has no format", '{"type": "structural_tag", "format": {...}}')
    if asked.kind == "json_schema" and not isinstance(source, dict | bool):
        raise refused("holds no JSON schema", "an object or a boolean")


def _calls(prompt: Conversation, text: ModelText) -> Format:
    tools = prompt.tools
    if prompt.tool_choice not in ("auto", "required"):
        tools = tuple(tool for tool in tools if tool.name == prompt.tool_choice)
    several = prompt.parallel_tool_calls and prompt.tool_choice in ("auto", "required")
    suffixed = text.template is not None and f"<tool_calls{SUFFIX}>" in text.template.source
    calls = calls_format(text.tool_format, tools, several=several, suffixed=suffixed)
    if calls is None:
        raise InvalidRequestError(
            "a call of a tool cannot be forced on this model: how it writes calls is not known",
            field="tool_choice",
            value=prompt.tool_choice,
            allowed="auto, none",
        )
    return calls


def _tagged(format: Format, field: str) -> OutputFormat:
    source = json.dumps({"type": _TAG, "format": format})
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(
            f"the grammar of the tools' calls has {len(source)} characters",
            field="tools",
            value=f"{len(source)} characters",
            allowed=f"schemas of at most {MAX_GRAMMAR_CHARACTERS} characters there",
        )
    return OutputFormat(_TAG, source, field=field)


def _depth(value: object) -> int:
    """Levels of nesting, counted without recursion."""
    deepest, waiting = 0, [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, depth + 1)
            if deepest > MAX_GRAMMAR_DEPTH:
                break
            waiting += ((part, depth + 1) for part in (item.values() if isinstance(item, dict) else item))
    return deepest
