"""The requests that live in a scheduler, and what the face has yet to hear about them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from katydid_engine.block_pool import BlockEvents
from katydid_engine.messages import ChoiceEnd, ChoiceTokens, FirstToken, KvAsk
from katydid_engine.plan import Logprobs
from katydid_engine.request import FinishReason, LiveRequest, Phase, Sequence

__all__ = ["Ledger", "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened since it was last taken; ``drafted`` and ``accepted`` count draft tokens."""

    tokens: tuple[ChoiceTokens, ...]
    first_tokens: tuple[FirstToken, ...]
    ends: tuple[ChoiceEnd, ...]
    blocks: BlockEvents
    kv: tuple[KvAsk, ...]
    drafted: int = 0
    accepted: int = 0

    def __bool__(self) -> bool:
        return bool(self.tokens or self.first_tokens or self.ends or self.blocks or self.kv)


class Ledger:
    """Live requests by handle; each choice opens once and ends once."""

    def __init__(self) -> None:
        self.requests: dict[int, LiveRequest] = {}
        self._tokens: list[ChoiceTokens] = []
        self._first_tokens: list[FirstToken] = []
        self._ends: list[ChoiceEnd] = []
        self._drafted = 0
        self._accepted = 0

    def open(self, live: LiveRequest, sequence: Sequence) -> None:
        self.requests[live.request.handle] = live
        live.choices[sequence.choice] = sequence

    def expired(self, now: float) -> list[int]:
        """Handles of requests whose deadline has passed."""
        return [
            handle
            for handle, live in self.requests.items()
            if live.request.deadline is not None and live.request.deadline <= now
        ]

    def deadlines(self) -> list[float]:
        return [live.request.deadline for live in self.requests.values() if live.request.deadline is not None]

    def prompt_logprobs(self, sequence: Sequence, logprobs: Logprobs) -> None:
        sequence.live.prompt_tokens_reported += len(logprobs.chosen)
        handle = sequence.request.handle
        self._tokens.append(ChoiceTokens(handle, sequence.choice, array("I"), prompt_logprobs=logprobs))

    def new_tokens(self, sequence: Sequence, tokens: array[int], logprobs: Logprobs | None, now: float) -> None:
        """A sequence has got new tokens."""
        live, handle = sequence.live, sequence.request.handle
        self._tokens.append(ChoiceTokens(handle, sequence.choice, tokens, logprobs))
        if not live.has_first_token:
            live.enter(Phase.DECODE, now)
            live.first_token_at = now
            self._first_tokens.append(FirstToken(handle, live.cached, live.phases.take()))

    def verified(self, drafted: int, accepted: int) -> None:
        """So many drafts were verified, and so many of them were the sequence's own tokens."""
        self._drafted += drafted
        self._accepted += accepted

    def end(self, sequence: Sequence, reason: FinishReason, now: float, error: str = "", message: str = "") -> None:
        """A choice ends, and with it those that have not forked from it yet; with the last one the request is
        forgotten."""
        live, handle = sequence.live, sequence.request.handle
        del live.choices[sequence.choice]
        if not live.choices:
            live.phases.close(now)
            del self.requests[handle]
        ending = range(sequence.choice, sequence.choice + sequence.num_slots)
        for choice in ending:
            last = not live.choices and choice == ending[-1]
            self._ends.append(
                ChoiceEnd(
                    handle,
                    choice,
                    reason,
                    last,
                    sequence.num_new_output,
                    live.cached,
                    live.preemptions,
                    drafted=sequence.num_drafted,
                    accepted=sequence.num_accepted,
                    stop_token=sequence.tokens[-1] if reason is FinishReason.STOP else None,
                    error=error,
                    message=message,
                    intervals=live.phases.take() if last else (),
                )
            )

    def take(self, blocks: BlockEvents, kv: tuple[KvAsk, ...]) -> Outcome:
        outcome = Outcome(
            tuple(self._tokens),
            tuple(self._first_tokens),
            tuple(self._ends),
            blocks,
            kv,
            self._drafted,
            self._accepted,
        )
        self._drafted = self._accepted = 0
        self._tokens.clear()
        self._first_tokens.clear()
        self._ends.clear()
        return outcome
