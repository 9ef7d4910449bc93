"""Hy3's output: `<think>…</think>` before the answer, tool calls as tagged keys and values after it.

    <tool_calls>
    <tool_call>name<tool_sep>
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>
    </tool_calls>

Markers also appear with the tokenizer's suffix, as `<think:opensource>`. Arguments leave as JSON text, each value typed
by the tool's schema: a text as it comes, since it may be a whole file, others once they are complete.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from katydid_gateway.parsers.interface import Parsed
from katydid_gateway.parsers.json_values import declared_types, json_text, typed_value
from katydid_gateway.requests import Tool, ToolCall
from katydid_gateway.text.partial_match import held_suffix

__all__ = ["HY3_MARKERS", "SUFFIX", "Hy3Parser", "thinks_already"]

SUFFIX = ":opensource"


class _In(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALLS = auto()
    NAME = auto()
    ARGUMENTS = auto()
    KEY = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()


_MARKERS: dict[_In, dict[str, _In]] = {
    _In.CONTENT: {"<think>": _In.REASONING, "<tool_calls>": _In.CALLS},
    _In.REASONING: {"</think>": _In.CONTENT},
    _In.CALLS: {"<tool_call>": _In.NAME, "</tool_calls>": _In.CONTENT},
    _In.NAME: {"<tool_sep>": _In.ARGUMENTS, "</tool_call>": _In.CALLS},
    _In.ARGUMENTS: {"<arg_key>": _In.KEY, "</tool_call>": _In.CALLS},
    _In.KEY: {"</arg_key>": _In.BEFORE_VALUE},
    _In.BEFORE_VALUE: {"<arg_value>": _In.VALUE},
    _In.VALUE: {"</arg_value>": _In.ARGUMENTS},
}
HY3_MARKERS = frozenset(
    spelling for markers in _MARKERS.values() for marker in markers for spelling in (marker, f"{marker[:-1]}{SUFFIX}>")
)
"""Every marker in both spellings; none may be hidden from the parser."""


def thinks_already(prompt: str) -> bool:
    """Whether the rendered prompt ends inside a reasoning block, so that the answer begins with reasoning."""
    tail = prompt.rstrip()
    return tail.endswith(("<think>", f"<think{SUFFIX}>"))


class Hy3Parser:
    """Reads one choice. Tool markers count only with `tools`; `reasoning` says that the prompt opened a block."""

    def __init__(self, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> None:
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._state = _In.REASONING if reasoning else _In.CONTENT
        self._markers = {state: _spellings(markers, bool(tools)) for state, markers in _MARKERS.items()}
        self._buffer = ""
        self._field = ""
        self._name = ""
        self._key = ""
        self._keys = 0
        # What the value that is read may be, and whether it is a text, of which the beginning has left.
        self._types: set[str] = set()
        self._flows = False
        self._at_block_start = reasoning
        self.calls = 0

    @property
    def thinking(self) -> bool:
        return self._state is _In.REASONING

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        self._buffer += text
        while True:
            markers = self._markers[self._state]
            place, marker = _first(self._buffer, markers)
            if marker is None:
                keep = held_suffix(self._buffer, markers)
                self._text(self._buffer[: len(self._buffer) - keep], parsed)
                self._buffer = self._buffer[len(self._buffer) - keep :]
                return parsed
            self._text(self._buffer[:place], parsed)
            self._buffer = self._buffer[place + len(marker) :]
            self._enter(markers[marker], parsed)

    def finish(self) -> Parsed:
        parsed = Parsed()
        rest, self._buffer = self._buffer, ""
        self._text(rest, parsed)
        return parsed

    def _text(self, text: str, parsed: Parsed) -> None:
        if self._state is _In.CONTENT or self._state is _In.REASONING:
            if self._at_block_start:
                text = text.lstrip("\n")
                self._at_block_start = not text
            if self._state is _In.CONTENT:
                parsed.content += text
            else:
                parsed.reasoning += text
        elif self._flows:
            self._part(json_text(text)[1:-1], parsed)
        else:
            self._field += text
            if self._state is _In.VALUE and self._is_text():
                self._flows = True
                self._part(f"{self._opening()}{json_text(self._field)[:-1]}", parsed)

    def _enter(self, state: _In, parsed: Parsed) -> None:
        left, self._state = self._state, state
        field, self._field = self._field, ""
        self._at_block_start = state is _In.CONTENT or state is _In.REASONING
        if left is _In.NAME:
            self._begin_call(field.strip(), parsed)
        if left is _In.KEY:
            self._key = field.strip()
            self._types = declared_types(*self._schemas_of_key())
        elif left is _In.VALUE:
            self._end_argument(field, parsed)
        elif state is _In.CALLS and left in (_In.NAME, _In.ARGUMENTS):
            self._part(("{}" if not self._keys else "}"), parsed)

    def _begin_call(self, name: str, parsed: Parsed) -> None:
        self._name, self._keys = name, 0
        parsed.tool_calls.append(ToolCall(self.calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.calls += 1

    def _end_argument(self, value: str, parsed: Parsed) -> None:
        if self._flows:
            self._flows = False
            self._part('"', parsed)
        else:
            self._part(f"{self._opening()}{json_text(typed_value(value, *self._schemas_of_key()))}", parsed)
        self._keys += 1

    def _opening(self) -> str:
        return f"{'{' if not self._keys else ', '}{json_text(self._key)}: "

    def _is_text(self) -> bool:
        """Whether the value can be nothing else any more."""
        either = self._types == {"string", "null"}
        return self._types == {"string"} or (either and not "null".startswith(self._field.strip()))

    def _schemas_of_key(self) -> tuple[object, object]:
        """The schema of the value that is read, and that of all arguments, which it may refer to."""
        schema = self._schemas.get(self._name)
        properties = (schema or {}).get("properties")
        return properties.get(self._key) if isinstance(properties, Mapping) else None, schema

    def _part(self, arguments: str, parsed: Parsed) -> None:
        if arguments:
            parsed.tool_calls.append(ToolCall(self.calls - 1, arguments=arguments))


def _spellings(markers: Mapping[str, _In], tools: bool) -> dict[str, _In]:
    known = {marker: state for marker, state in markers.items() if tools or state is not _In.CALLS}
    return known | {f"{marker[:-1]}{SUFFIX}>": state for marker, state in known.items()}


def _first(text: str, markers: Mapping[str, _In]) -> tuple[int, str | None]:
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=(0, None))
