"""Which family's output format a model writes, and the parser for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from katydid_gateway.parsers.hy3 import HY3_MARKERS, SUFFIX, Hy3Parser, thinks_already
from katydid_gateway.parsers.interface import OutputParser, PlainParser
from katydid_gateway.parsers.json_calls import HERMES_MARKERS, LLAMA_MARKERS, HermesParser, LlamaParser
from katydid_gateway.requests import Tool

__all__ = ["THOUGHT_ENDS", "VISIBLE_MARKERS", "format_of", "output_parser"]

THOUGHT_ENDS = ("</think>", f"</think{SUFFIX}>")
"""What a block of reasoning ends with; in most vocabularies one token."""

VISIBLE_MARKERS: Mapping[str, frozenset[str]] = {
    "hy3": HY3_MARKERS,
    "hermes": HERMES_MARKERS,
    "llama": LLAMA_MARKERS,
    "none": frozenset(),
}
"""Special tokens that must reach the parser as text, by format."""


def format_of(template: str) -> str:
    """The format that a chat template asks its model to write; "none" when it knows none of ours."""
    if "<tool_sep" in template:
        return "hy3"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "<|python_tag|>" in template or "ipython" in template:
        return "llama"
    return "none"


def output_parser(format: str, tools: Sequence[Tool], prompt: str) -> OutputParser:
    """A parser for one choice of the answer to the rendered `prompt`, which offered `tools`."""
    match format:
        case "hy3":
            return Hy3Parser(tools, reasoning=thinks_already(prompt))
        case "hermes":
            return HermesParser(tools=bool(tools), reasoning=thinks_already(prompt))
        case "llama":
            return LlamaParser(tools=bool(tools), reasoning=thinks_already(prompt))
    return PlainParser()
