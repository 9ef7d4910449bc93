"""Hermes', Qwen's and Llama's output: `<think>…</think>` before the answer, tool calls as JSON objects.

Hermes and Qwen put each call between `<tool_call>` and `</tool_call>`. Llama 3 gives the whole answer to calls: it
begins with `<|python_tag|>` or with the object itself, and `;` separates several. An object without a name is text like
any other.
"""

from __future__ import annotations

import uuid
from enum import Enum, auto

from katydid_gateway.parsers.interface import Parsed
from katydid_gateway.parsers.json_call import JsonCallReader
from katydid_gateway.requests import ToolCall
from katydid_gateway.text.partial_match import held_suffix

__all__ = ["HERMES_MARKERS", "LLAMA_MARKERS", "HermesParser", "LlamaParser"]

_THINK, _THOUGHT, _OPEN, _CLOSE = "<think>", "</think>", "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
HERMES_MARKERS = frozenset((_THINK, _THOUGHT, _OPEN, _CLOSE))
LLAMA_MARKERS = frozenset((_THINK, _THOUGHT, _PYTHON))


class _In(Enum):
    START = auto()
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()
    AFTER_CALL = auto()


class _JsonCalls:
    """What both families share: reasoning, and calls read by a JsonCallReader."""

    def __init__(self, *, tools: bool, reasoning: bool = False) -> None:
        self.calls = 0
        self._tools = tools
        self._state = _In.REASONING if reasoning else _In.START
        self._buffer = ""
        self._reader = JsonCallReader()
        self._named = False
        # Whether the block of reasoning being read has said anything yet.
        self._thought = False
        # What opened the call being read: it comes back as text when the call turns out to be none.
        self._opener = ""

    @property
    def thinking(self) -> bool:
        """Whether it is within a block of reasoning."""
        return self._state is _In.REASONING

    def feed(self, text: str) -> Parsed:
        """What is certain after this chunk."""
        parsed = Parsed()
        self._buffer += text
        while self._advance(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """What was held back, when no more text comes."""
        parsed = Parsed()
        if self._state is _In.CALL and not self._named:
            parsed.content += self._opener + self._reader.raw
        rest, self._buffer = self._buffer, ""
        if self._state is _In.REASONING:
            parsed.reasoning += rest.rstrip("\n")
        elif self._state is not _In.AFTER_CALL or rest.strip():
            parsed.content += rest
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        raise NotImplementedError

    def _think(self, parsed: Parsed, after: _In) -> bool:
        """Reads on in a block of reasoning; line ends at its borders are the format's, not the thought's."""
        if not self._thought:
            self._buffer = self._buffer.lstrip("\n")
        place = self._buffer.find(_THOUGHT)
        if place < 0:
            certain = self._buffer[: len(self._buffer) - held_suffix(self._buffer, (_THOUGHT,))].rstrip("\n")
            parsed.reasoning += self._take(len(certain))
            self._thought = self._thought or bool(certain)
            return False
        parsed.reasoning += self._take(place).rstrip("\n")
        self._take(len(_THOUGHT))
        self._state, self._thought = after, False
        return True

    def _open_call(self, opener: str) -> None:
        self._state, self._opener = _In.CALL, opener
        self._reader, self._named = JsonCallReader(), False

    def _read_call(self, parsed: Parsed) -> bool:
        """Reads on in a call; true once its object has ended."""
        arguments, count = self._reader.feed(self._buffer)
        self._take(count)
        if not self._named and self._reader.name is not None:
            self._named = True
            parsed.tool_calls.append(ToolCall(self.calls, f"call_{uuid.uuid4().hex[:24]}", self._reader.name))
            self.calls += 1
        if arguments:
            parsed.tool_calls.append(ToolCall(self.calls - 1, arguments=arguments))
        if not self._reader.ended:
            return False
        if not self._named:
            parsed.content += self._opener + self._reader.raw
        elif not self._reader.wrote:
            parsed.tool_calls.append(ToolCall(self.calls - 1, arguments="{}"))
        return True

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


class HermesParser(_JsonCalls):
    """Reads one choice of a Hermes or Qwen model. `reasoning` says that the prompt opened a block."""

    def _advance(self, parsed: Parsed) -> bool:
        match self._state:
            case _In.REASONING:
                return self._think(parsed, _In.AFTER_CALL)
            case _In.CALL:
                if not self._read_call(parsed):
                    return False
                self._state = _In.CONTENT if not self._named else _In.AFTER_CALL
                return True
            case _In.AFTER_CALL:
                # The closing tag and the line ends around calls and thoughts are no part of the answer.
                self._buffer = self._buffer.lstrip()
                if self._buffer.startswith(_CLOSE):
                    self._take(len(_CLOSE))
                    return True
                if _CLOSE.startswith(self._buffer):
                    return False
                self._state = _In.START
                return True
        markers = (_THINK, _OPEN) if self._tools else (_THINK,)
        found = [(place, marker) for marker in markers if (place := self._buffer.find(marker)) >= 0]
        if not found:
            certain = self._buffer[: len(self._buffer) - held_suffix(self._buffer, markers)]
            if self._tools:
                # Space before a call belongs to the call.
                certain = certain.rstrip()
            parsed.content += self._take(len(certain))
            return False
        place, marker = min(found)
        text = self._take(place)
        parsed.content += text.rstrip() if marker == _OPEN else text
        self._take(len(marker))
        if marker == _THINK:
            self._state = _In.REASONING
        else:
            self._open_call(marker)
        return True


class LlamaParser(_JsonCalls):
    """Reads one choice of a Llama 3 model."""

    def _advance(self, parsed: Parsed) -> bool:
        match self._state:
            case _In.REASONING:
                return self._think(parsed, _In.START)
            case _In.CONTENT:
                parsed.content += self._take(len(self._buffer))
                return False
            case _In.CALL:
                if not self._read_call(parsed):
                    return False
                self._state = _In.AFTER_CALL if self._named else _In.CONTENT
                return True
            case _In.AFTER_CALL:
                self._buffer = self._buffer.lstrip("; \n")
                if not self._buffer:
                    return False
                if self._buffer[0] == "{":
                    self._open_call("")
                else:
                    self._state = _In.CONTENT
                return True
        start = self._buffer.lstrip()
        if not start:
            return False
        if start.startswith(_THINK):
            self._buffer = start[len(_THINK) :]
            self._state = _In.REASONING
        elif self._tools and start.startswith(_PYTHON):
            self._buffer = start[len(_PYTHON) :].lstrip()
            if not self._buffer:
                self._buffer = _PYTHON
                return False
            self._state = _In.CONTENT
            if self._buffer[0] == "{":
                self._open_call(_PYTHON)
        elif self._tools and start[0] == "{":
            self._buffer = start
            self._open_call("")
        elif _THINK.startswith(start) or (self._tools and _PYTHON.startswith(start)):
            return False
        else:
            self._state = _In.CONTENT
        return True
