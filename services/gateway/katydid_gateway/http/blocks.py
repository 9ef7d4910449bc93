"""An answer as a sequence of blocks, thoughts, text and tool calls, each opened, grown and closed: what Anthropic's
Messages and OpenAI's Responses have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from katydid_gateway.requests import Delta, FinishReason

__all__ = ["Block", "BlockForm", "BlockKind"]


class BlockKind(StrEnum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block; `text` is what it holds so far, of a call its arguments. `id` and `name` are a call's."""

    index: int
    kind: BlockKind
    id: str = ""
    name: str = ""
    text: str = ""


class BlockForm(ABC):
    """See Form. A subclass says what its API writes when something happens to a block; one answer of one choice."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish: FinishReason | None = None
        self.stop_string: str | None = None
        self._begun = False
        self._open: Block | None = None
        self._call = -1

    @abstractmethod
    def begun(self) -> bytes:
        """Events before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> bytes:
        """Events of a new block, which is empty."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> bytes:
        """Events of `text` having been added to a block."""

    @abstractmethod
    def closed(self, block: Block) -> bytes:
        """Events of a block that is complete."""

    @abstractmethod
    def last_events(self) -> bytes:
        """Events after the last block."""

    @abstractmethod
    def whole(self) -> bytes:
        """The complete answer as one object."""

    def chunk(self, _place: int, delta: Delta) -> bytes:
        """See Form."""
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            events.append(self.begun())
        if delta.reasoning:
            self._add(events, BlockKind.REASONING, delta.reasoning)
        if delta.text:
            self._add(events, BlockKind.TEXT, delta.text)
        for part in delta.tool_calls:
            if part.index != self._call:
                self._call = part.index
                self._begin(events, Block(len(self.blocks), BlockKind.CALL, part.id, part.name))
            self._grow(events, part.arguments)
        if delta.finish is not None:
            self.finish, self.stop_string = delta.finish, delta.stop_string
            self._end(events)
        return b"".join(events)

    def collect(self, place: int, delta: Delta) -> None:
        """See Form."""
        self.chunk(place, delta)

    def _add(self, events: list[bytes], kind: BlockKind, text: str) -> None:
        if self._open is None or self._open.kind is not kind:
            self._begin(events, Block(len(self.blocks), kind))
        self._grow(events, text)

    def _begin(self, events: list[bytes], block: Block) -> None:
        self._end(events)
        self._open = block
        self.blocks.append(block)
        events.append(self.opened(block))

    def _grow(self, events: list[bytes], text: str) -> None:
        if self._open is not None and text:
            self._open.text += text
            events.append(self.grown(self._open, text))

    def _end(self, events: list[bytes]) -> None:
        if self._open is not None:
            events.append(self.closed(self._open))
            self._open = None
