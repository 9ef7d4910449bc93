"""One small interface for every family's output format: text in chunks, pieces out.

A parser may be fed any split of the text and must give the same pieces when they are joined.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from katydid_gateway.requests import ToolCall

__all__ = ["OutputParser", "Parsed", "PlainParser"]


@dataclass(slots=True)
class Parsed:
    """What a chunk of text turned out to be. `tool_calls` are parts: the first of a call has its id and name."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class OutputParser(Protocol):
    """Reads one choice's text."""

    @property
    def calls(self) -> int:
        """Tool calls begun so far."""

    @property
    def thinking(self) -> bool:
        """Whether it is within a block of reasoning."""

    def feed(self, text: str) -> Parsed:
        """What is certain after this chunk."""

    def finish(self) -> Parsed:
        """What was held back, when no more text comes."""


class PlainParser:
    """For models without a format, and for prompts without a template: all text is content."""

    calls = 0
    thinking = False

    def feed(self, text: str) -> Parsed:
        return Parsed(text)

    def finish(self) -> Parsed:
        return Parsed()
