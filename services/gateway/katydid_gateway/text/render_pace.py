"""How long a template takes: what it will take decides whether the loop waits or a thread does the work.

Templates differ by a factor of twenty. A thread costs the way there and back, and holds the GIL like the loop would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from katydid_gateway.requests import Conversation

__all__ = ["RenderPace", "weight_of"]

T = TypeVar("T")

# What the loop, and with it every stream, may stand still for.
_INLINE_S = 0.002
# Before anything was measured, this is little: eight short messages, or one of 8,000 characters.
_LITTLE = 8.0
# A message weighs 1, and so do so many characters; a tool is written out of a whole schema.
_CHARACTERS = 1024
# Of a call's arguments, which templates go through one by one.
_ARGUMENT_CHARACTERS = 64
_TOOL = 8.0
_NEW_SHARE = 0.2
# Reading a thread's clock takes tens of microseconds: of conversations that take little more, one in so many is timed.
_CHEAP_S = 0.0005
_CHEAP_TIMED = 16


def weight_of(conversation: Conversation) -> float:
    """How much there is to render."""
    texts = (text for message in conversation.messages for text in (message.content, message.reasoning) if text)
    arguments = sum(len(call.arguments) for message in conversation.messages for call in message.tool_calls)
    written = sum(map(len, texts)) / _CHARACTERS + arguments / _ARGUMENT_CHARACTERS
    return len(conversation.messages) + _TOOL * len(conversation.tools) + written


class RenderPace:
    """Seconds of CPU by weight of a conversation, averaged over the last dozen."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._cheap = 0

    def inline(self, weight: float) -> bool:
        """Whether a conversation of this weight is rendered sooner than handed to a thread."""
        return weight <= _LITTLE if self._seconds is None else weight * self._seconds <= _INLINE_S

    def timed(self, weight: float, work: Callable[[], T]) -> T:
        """The result of `work`, which renders one of this weight; may be called in a thread."""
        if self._seconds is not None and weight * self._seconds < _CHEAP_S:
            self._cheap = (self._cheap + 1) % _CHEAP_TIMED
            if self._cheap:
                return work()
        began = time.thread_time()
        try:
            return work()
        finally:
            seconds = (time.thread_time() - began) / max(1.0, weight)
            known = self._seconds
            self._seconds = seconds if known is None else known + _NEW_SHARE * (seconds - known)
