"""One choice of an answer while it is generated: rows of tokens in, pieces of text, reasoning and tool calls out."""

from __future__ import annotations

from array import array

from katydid_runtime.block_hash import pack_ids

from katydid_gateway.engines.frames import Row, RowLogprobs
from katydid_gateway.parsers.interface import OutputParser, Parsed
from katydid_gateway.requests import Delta, FinishReason, TokenLogprob
from katydid_gateway.text.choice_text import ChoiceText
from katydid_gateway.text.detokenizer import Vocabulary

__all__ = ["ChoiceStream", "token_logprobs"]


class ChoiceStream:
    """State of one choice. `done` turns true with the delta that carries its finish reason; later rows are dropped.

    `thought_ends` are tokens that end a block of reasoning; they count to it.
    """

    def __init__(
        self,
        index: int,
        text: ChoiceText,
        parser: OutputParser,
        vocabulary: Vocabulary,
        *,
        include_stop: bool,
        thought_ends: frozenset[int] = frozenset(),
    ) -> None:
        self.index = index
        self.tokens = 0
        self.reasoning_tokens = 0
        self.done = False
        self._text = text
        self._parser = parser
        self._vocabulary = vocabulary
        self._include_stop = include_stop
        self._thought_ends = thought_ends

    def feed(self, row: Row) -> Delta:
        """New tokens. The delta carries a finish reason when they completed a stop string."""
        ids = row.ids
        visible = ids[:-1] if row.stop_token is not None and not self._include_stop else ids
        logprobs = () if row.logprobs is None else token_logprobs(visible, row.logprobs, self._vocabulary)
        step = self._text.feed(visible, logprobs)
        counted = step.tokens if self._text.stopped else len(ids)
        thought = self._parser.thinking
        delta = self._delta(self._parser.feed(step.text), ids[:counted], step.logprobs)
        self.tokens += counted
        if thought or delta.reasoning or self._parser.thinking:
            self.reasoning_tokens += self._thoughts(ids[:counted], delta)
        if self._text.stopped:
            self._end(delta, FinishReason.STOP)
        return delta

    def _thoughts(self, ids: array[int], delta: Delta) -> int:
        """How many of these tokens are reasoning, some of which are."""
        if self._parser.thinking:
            return len(ids)
        for place in range(len(ids), 0, -1):
            if ids[place - 1] in self._thought_ends:
                return place
        return 0 if delta.text else len(ids)

    def finish(self, reason: FinishReason) -> Delta:
        """The engine ended the choice: what was held back comes out."""
        step = self._text.finish()
        delta = self._delta(self._parser.feed(step.text), array("I"), step.logprobs)
        self._end(delta, reason)
        return delta

    def _end(self, delta: Delta, reason: FinishReason) -> None:
        rest = self._parser.finish()
        delta.text += rest.content
        delta.reasoning += rest.reasoning
        delta.tool_calls += rest.tool_calls
        called = reason is FinishReason.STOP and self._parser.calls > 0
        delta.stop_string = self._text.stop_string
        delta.finish = FinishReason.TOOL_CALLS if called else reason
        self.done = True

    def _delta(self, parsed: Parsed, ids: array[int], logprobs: list[TokenLogprob]) -> Delta:
        return Delta(
            index=self.index,
            text=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            ids=pack_ids(ids),
            logprobs=logprobs,
        )


def token_logprobs(ids: array[int], columns: RowLogprobs, vocabulary: Vocabulary) -> list[TokenLogprob]:
    """The columns of a row as one record a token of `ids`."""
    records = []
    for place, token in enumerate(ids):
        start = place * columns.top
        top = tuple(
            _record(columns.top_ids[at], columns.top_values[at], vocabulary) for at in range(start, start + columns.top)
        )
        records.append(_record(token, columns.chosen[place], vocabulary, top))
    return records


def _record(token: int, logprob: float, vocabulary: Vocabulary, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    raw = vocabulary.raw(token)
    return TokenLogprob(token, raw.decode("utf-8", "replace"), raw, logprob, top)
