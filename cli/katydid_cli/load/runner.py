"""Sends a workload on its own schedule, whatever the server does: an open loop.

A closed loop waits for answers, so a slow server is asked less and looks better than it is. Here a request's clock
starts when it was due, not when it could be sent; how late the sender itself was is reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from katydid_client import AsyncKatydid, Completion, KatydidError

from katydid_cli.load.workload import Session, TokenSource, Turn

__all__ = ["Outcome", "run_workload"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Times in seconds; `due_s` counts from the start of the run, all others from when it was due.

    `gaps_s` are the times between events that carried tokens; `error` is a reason such as "OVERLOADED", or "".
    """

    due_s: float
    late_s: float
    ttft_s: float | None
    end_s: float
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    engine: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None without a second token."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.ttft_s) / (self.output_tokens - 1)


async def run_workload(
    client: AsyncKatydid,
    sessions: Sequence[Session],
    tokens: TokenSource,
    *,
    model: str = "",
    ignore_eos: bool = True,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Run all sessions and return an outcome a request, in order of being due. Failures are outcomes, not exceptions.

    A session whose turn failed ends there: what would have followed it cannot be asked.
    """
    outcomes: list[Outcome] = []
    start = time.monotonic()

    async def session(plan: Session) -> None:
        history: list[int] = []
        ready_s = plan.start_s
        for turn in plan.turns:
            due_s = ready_s + turn.think_s
            await asyncio.sleep(start + due_s - time.monotonic())
            prompt = history + tokens.ids(turn.pieces)
            outcome, completion = await _ask(client, prompt, turn, start, due_s, model, ignore_eos)
            outcomes.append(outcome)
            on_outcome(outcome)
            if completion is None:
                return
            history = [*prompt, *completion.choices[0].token_ids]
            ready_s = time.monotonic() - start

    async with asyncio.TaskGroup() as group:
        for plan in sessions:
            group.create_task(session(plan))
    return sorted(outcomes, key=lambda outcome: outcome.due_s)


async def _ask(
    client: AsyncKatydid, prompt: list[int], turn: Turn, start: float, due_s: float, model: str, ignore_eos: bool
) -> tuple[Outcome, Completion | None]:
    due = start + due_s
    late_s = time.monotonic() - due
    arrivals: list[float] = []
    received = 0
    completion: Completion | None = None
    reason = ""
    try:
        async with client.generate_stream(
            prompt, model=model, max_tokens=turn.output_tokens, ignore_eos=ignore_eos
        ) as stream:
            async for event in stream:
                if event.token_ids or event.text:
                    arrivals.append(time.monotonic() - due)
                    received += len(event.token_ids)
            completion = await stream.get_final()
    except KatydidError as error:
        reason = error.reason
    end_s = time.monotonic() - due
    outcome = Outcome(
        due_s=due_s,
        late_s=late_s,
        ttft_s=arrivals[0] if arrivals else None,
        end_s=end_s,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(arrivals)),
        prompt_tokens=len(prompt),
        output_tokens=completion.usage.completion_tokens if completion else received,
        cached_tokens=completion.usage.cached_tokens if completion else 0,
        engine=completion.timing.engine if completion else "",
        error=reason,
    )
    return outcome, completion
