"""An engine as routing sees one: continuous batching with a token budget a step, and a prefix cache with LRU eviction.

A step takes one token of every running request and, within its budget, tokens of the oldest waiting prompts:

    step time = base + per_request * running + prompt tokens of the step / prefill speed

Between two events nothing changes but token counts, so steps that only decode are taken many at a time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_cli.simulation.trace import Arrival

__all__ = ["EngineModel", "EngineSpeeds", "Job", "PrefixCache"]


@dataclass(frozen=True, slots=True)
class EngineSpeeds:
    """What an engine can do: tokens a second of prefill, seconds of a decode step, and its KV memory in tokens."""

    prefill_tokens_per_s: float = 8000.0
    step_s: float = 0.006
    step_per_request_s: float = 0.00035
    budget_tokens: int = 2048
    cache_tokens: int = 524_288
    max_running: int = 256


@dataclass(slots=True)
class Job:
    """A request on an engine; times in seconds, None until they come."""

    arrival: Arrival
    cached_tokens: int = 0
    to_prefill: int = 0
    to_decode: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None


class PrefixCache:
    """Blocks an engine holds, at most `blocks` of them (None: any number); suffixes leave before prefixes."""

    def __init__(self, blocks: int | None) -> None:
        self._limit = blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def depth(self, chain: Sequence[bytes]) -> int:
        """Leading blocks of `chain` that are here."""
        return next((place for place, block in enumerate(chain) if block not in self._blocks), len(chain))

    def put(self, chain: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Keep a prompt's blocks as the newest; returns (stored, removed)."""
        stored: list[bytes] = []
        # From the end, so that the prefix is the newest.
        for block in reversed(chain):
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                self._blocks[block] = None
                stored.append(block)
        removed: list[bytes] = []
        while self._limit is not None and len(self._blocks) > self._limit:
            removed.append(self._blocks.popitem(last=False)[0])
        return stored, removed

    def drop(self, blocks: Sequence[bytes]) -> None:
        """Forget blocks, wherever they are."""
        for block in blocks:
            self._blocks.pop(block, None)


class EngineModel:
    """One engine. `advance` it to the present before asking it anything."""

    def __init__(
        self,
        name: str,
        speeds: EngineSpeeds,
        *,
        infinite_cache: bool = False,
        on_blocks: Callable[[str, list[bytes], list[bytes]], None] = lambda _name, _stored, _removed: None,
    ) -> None:
        self.name = name
        self.speeds = speeds
        self.cache = PrefixCache(None if infinite_cache else speeds.cache_tokens // BLOCK_TOKENS)
        self.now = 0.0
        self.busy_s = 0.0
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.begun: list[Job] = []
        """Jobs that got their first token, for whoever empties it."""
        self._on_blocks = on_blocks

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return sum(job.to_prefill for job in self.waiting)

    @property
    def decode_tokens_per_s(self) -> float:
        """What a step that only decodes makes now."""
        count = len(self.running)
        return count / (self.speeds.step_s + self.speeds.step_per_request_s * count)

    @property
    def prefill_tokens_per_s(self) -> float:
        """What an engine measures of its own: tokens of a full step over its time, decoding included."""
        speeds, budget = self.speeds, self.speeds.budget_tokens
        own_s = speeds.step_s + speeds.step_per_request_s * len(self.running)
        return budget / (own_s + budget / speeds.prefill_tokens_per_s)

    @property
    def held_tokens(self) -> int:
        """Prompt tokens of running requests: what is held and not only cached."""
        return sum(job.arrival.prompt_tokens for job in self.running)

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, job: Job) -> None:
        """A request arrives now. What its prompt can reuse is settled when its turn comes; this is the estimate."""
        job.to_prefill = self._uncached(job)
        job.to_decode = job.arrival.output_tokens
        self.waiting.append(job)

    def advance(self, until: float) -> None:
        """Work up to a time; a step that has begun is finished, so `now` may lie a little behind it."""
        while self.now < until:
            if not self.waiting and not self.running:
                self.now = until
                return
            self._step(until)

    def drain(self) -> None:
        """Finish everything."""
        while self.waiting or self.running:
            self._step(float("inf"))

    def _uncached(self, job: Job) -> int:
        job.cached_tokens = min(self.cache.depth(job.arrival.chain) * BLOCK_TOKENS, job.arrival.prompt_tokens - 1)
        return job.arrival.prompt_tokens - job.cached_tokens

    def _step(self, until: float) -> None:
        begun = self.now
        decoding = len(self.running)
        own_s = self.speeds.step_s + self.speeds.step_per_request_s * decoding
        prefilled: list[Job] = []
        tokens = 0
        while self.waiting and tokens < self.speeds.budget_tokens and len(self.running) < self.speeds.max_running:
            job = self.waiting[0]
            if job.ended_at is None and job.first_token_at is None and job.to_prefill == self._whole(job):
                job.to_prefill = self._uncached(job)
            part = min(job.to_prefill, self.speeds.budget_tokens - tokens)
            job.to_prefill -= part
            tokens += part
            if job.to_prefill:
                break
            prefilled.append(self.waiting.popleft())
        if tokens:
            self.now += own_s + tokens / self.speeds.prefill_tokens_per_s
            self._decode(1)
        else:
            steps = min(job.to_decode for job in self.running)
            if until != float("inf"):
                steps = max(1, min(steps, int((until - self.now) / own_s) + 1))
            self.now += steps * own_s
            self._decode(steps)
        for job in prefilled:
            self._begin(job)
        self.busy_s += self.now - begun

    def _whole(self, job: Job) -> int:
        """What a prompt nobody has begun to compute has left."""
        return job.arrival.prompt_tokens - job.cached_tokens

    def _begin(self, job: Job) -> None:
        job.first_token_at = self.now
        self.begun.append(job)
        stored, removed = self.cache.put(job.arrival.chain)
        if stored or removed:
            self._on_blocks(self.name, stored, removed)
        job.to_decode -= 1
        if job.to_decode:
            self.running.append(job)
        else:
            job.ended_at = self.now

    def _decode(self, steps: int) -> None:
        ended = False
        for job in self.running:
            job.to_decode -= steps
            if job.to_decode <= 0:
                job.ended_at = self.now
                ended = True
        if ended:
            self.running = [job for job in self.running if job.ended_at is None]
