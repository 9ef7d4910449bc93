"""One session with the face inside its own process: frames sorted by request, for callers with a stream a request."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.block_hash import unpack_ids
from katydid_runtime.errors import UnavailableError

from katydid_engine.face import Face
from katydid_engine.submission import requested_choices

__all__ = ["LocalSession", "Step", "Submitted", "sorted_steps"]


@dataclass(slots=True)
class Step:
    """What one frame holds for one request: tokens and log probabilities by choice, and choices that ended."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    cached: pb.CachedTokens | None = None
    finishes: list[pb.Finish] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request under way: its steps, and how to end it early, which is its last step then."""

    steps: AsyncIterator[Step]
    abort: Callable[[], None]


class LocalSession:
    """`run` it for as long as requests are submitted. Frames are acknowledged at once; what a caller has not taken yet
    is its request's own output and no more."""

    def __init__(self, face: Face) -> None:
        self.loads: Mapping[int, pb.RankLoad] = {}
        self._face = face
        self._session, self._stream, self._opened = face.open_session(pb.SessionOpen(client="vllm protocol"))
        self._numbers = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[Step | None]] = {}

    async def run(self) -> None:
        """Hand frames out until cancelled."""
        try:
            async for frame in self._session.frames(self._stream, self._opened):
                self._session.acknowledge(frame.frame)
                self.loads = {load.dp_rank: load for load in frame.loads}
                for number, step in sorted_steps(frame).items():
                    if (queue := self._queues.get(number)) is not None:
                        queue.put_nowait(step)
        finally:
            for queue in self._queues.values():
                queue.put_nowait(None)
            self._face.close_stream(self._session, self._stream)

    @asynccontextmanager
    async def submit(self, message: pb.SubmitRequest) -> AsyncIterator[Submitted]:
        """Sends the request under a number of its own; leaving before its end aborts it."""
        number = message.request = next(self._numbers)
        queue: asyncio.Queue[Step | None] = asyncio.Queue()
        self._queues[number] = queue
        open_choices = set(range(requested_choices(message, self._face.limits)))

        async def steps() -> AsyncIterator[Step]:
            while open_choices:
                step = await queue.get()
                if step is None:
                    raise UnavailableError("the engine is going down")
                open_choices.difference_update(finish.choice for finish in step.finishes)
                yield step

        try:
            self._face.submit(self._session, message)
            yield Submitted(steps(), lambda: self._face.abort(self._session, number))
        finally:
            del self._queues[number]
            if open_choices:
                self._face.abort(self._session, number)

    def least_loaded(self) -> int:
        """The rank with the fewest tokens to compute."""
        return min(self.loads, key=lambda rank: self.loads[rank].waiting_uncached_tokens, default=0)


def sorted_steps(frame: pb.SessionResponse) -> dict[int, Step]:
    """Steps by request number."""
    steps: dict[int, Step] = {}
    columns = frame.tokens
    requests, counts, tokens = unpack_ids(columns.requests), unpack_ids(columns.counts), unpack_ids(columns.tokens)
    choices = unpack_ids(columns.choices) if columns.choices else [0] * len(requests)
    start = 0
    for request, choice, count in zip(requests, choices, counts, strict=True):
        own = steps.setdefault(request, Step()).tokens.setdefault(choice, [])
        own.extend(tokens[start : start + count])
        start += count
    for first in frame.first_tokens:
        steps.setdefault(first.request, Step()).cached = first.cached
    for logprobs in frame.logprobs:
        steps.setdefault(logprobs.request, Step()).logprobs.append(logprobs)
    for finish in frame.finishes:
        steps.setdefault(finish.request, Step()).finishes.append(finish)
    return steps
