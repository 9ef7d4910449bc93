"""Requests of a benchmark, timed: over an engine's session, and through a gateway."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from katydid_client import AsyncKatydid

from tests.engine.engine_process import Answer, SessionClient

__all__ = ["PATIENCE_S", "TAIL", "Stream", "ended", "prompt", "streamed", "timed"]

TAIL = 16
"""Tokens of an answer."""
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Stream:
    """Ids, seconds to the first, from that to the second, the longest between two, and the engine that ended it."""

    ids: list[int]
    first_s: float
    gap_s: float
    longest_s: float
    engine: str


async def streamed(
    client: AsyncKatydid,
    ids: list[int],
    tokens: int = TAIL,
    at: tuple[int, Callable[[], None]] | None = None,
    **fields: Any,
) -> Stream:
    """``at`` so many tokens something is done."""
    began = time.perf_counter()
    seen: list[int] = []
    times: list[float] = []
    async with client.generate_stream(ids, max_tokens=tokens, temperature=0.0, ignore_eos=True, **fields) as stream:
        async for event in stream:
            seen += event.token_ids
            times += [time.perf_counter()] * len(event.token_ids)
            if at is not None and len(seen) >= at[0]:
                at[1]()
                at = None
        final = await stream.get_final()
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert final.timing is not None
    return Stream(seen, times[0] - began, waits[0], max(waits), final.timing.engine)


async def timed(client: SessionClient, ids: list[int], **fields: Any) -> tuple[Answer, float, float]:
    """The answer, seconds to its first token, and from that to its second."""
    started = time.perf_counter()
    answer = client.submit(ids, **({"max_tokens": TAIL, "ignore_eos": True} | fields))
    times = []
    for wanted in (1, 2):
        while len(answer.output) < wanted and not answer.done.is_set():  # noqa: ASYNC110 - the session has no event
            await asyncio.sleep(0.0002)
        times.append(time.perf_counter())
    return await ended(answer), times[0] - started, times[1] - times[0]


async def ended(answer: Answer) -> Answer:
    await asyncio.wait_for(answer.done.wait(), PATIENCE_S)
    if answer.end.HasField("error"):
        raise RuntimeError(f"{answer.end.error.reason}: {answer.end.error.message}")
    return answer


def prompt(length: int, seed: int, most: int = 250) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(3, most) for _ in range(length)]
