"""The text of one choice while its tokens arrive: detokenised, cut at stop strings, log probabilities kept in step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from katydid_gateway.requests import TokenLogprob
from katydid_gateway.text.detokenizer import Detokenizer
from katydid_gateway.text.stop_strings import StopFinder

__all__ = ["ChoiceText", "TextStep"]


@dataclass(slots=True)
class TextStep:
    """What some tokens added: certain text, how many of the tokens count, and the log probabilities of that text."""

    text: str
    tokens: int
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ChoiceText:
    """Feed it tokens until `stopped` or the engine's end, then `finish` once.

    Stop strings are searched from token `min_tokens` on. Tokens behind the one that completed a stop string are not
    counted; a log probability is given out when its token's text is, and withheld for text that the stop cut off.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._finder = StopFinder(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._tokens = 0
        self._decoded = 0
        self._released = 0
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return None if self._finder is None else self._finder.found

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> TextStep:
        """New tokens; `logprobs` is empty or has one entry a token."""
        if self._finder is None and not logprobs:
            self._tokens += len(ids)
            return TextStep(self._detokenizer.feed(ids), len(ids))
        pieces: list[str] = []
        counted = 0
        for place, token in enumerate(ids):
            if self.stopped:
                break
            counted += 1
            start = self._decoded
            piece = self._detokenizer.feed((token,))
            self._decoded += len(piece)
            if logprobs:
                self._waiting.append((start, self._decoded, logprobs[place]))
            pieces.append(self._certain(piece))
            self._tokens += 1
        text = "".join(pieces)
        self._released += len(text)
        return TextStep(text, counted, self._released_logprobs())

    def finish(self) -> TextStep:
        """The rest, when the engine has ended the choice."""
        if self.stopped:
            return TextStep("", 0)
        tail = self._detokenizer.finish()
        if self._finder is not None:
            certain = self._finder.feed(tail)
            tail = certain if self._finder.stopped else certain + self._finder.finish()
        self._decoded += len(tail)
        self._released += len(tail)
        waiting = [] if self.stopped else [entry for _, _, entry in self._waiting]
        self._waiting.clear()
        return TextStep(tail, 0, waiting)

    def _certain(self, piece: str) -> str:
        # Token number `_tokens` is the first that may stop when `_tokens + 1 >= min_tokens`.
        if self._finder is None or self._tokens + 1 < self._min_tokens:
            return piece
        return self._finder.feed(piece)

    def _released_logprobs(self) -> list[TokenLogprob]:
        ready: list[TokenLogprob] = []
        while self._waiting:
            start, end, entry = self._waiting[0]
            if end > self._released and not (self.stopped and start < self._released):
                break
            self._waiting.popleft()
            ready.append(entry)
        return ready
