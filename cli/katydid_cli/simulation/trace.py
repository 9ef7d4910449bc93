"""Traffic to replay: hash-only traces in Mooncake's format, and an agent workload made to the shape of a published one.

A trace line is {"timestamp": ms, "input_length", "output_length", "hash_ids"}; equal ids are equal prefix blocks, so a
capture tells lengths and sharing and not one word of a prompt.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.errors import SettingsError

__all__ = ["Agents", "Arrival", "agent_traffic", "read_trace"]


_LONGEST = 10_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, in seconds, the hashes of its prompt's 64-token blocks, and its lengths in tokens."""

    at: float
    chain: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    session: str = ""


def read_trace(path: Path, *, rate_scale: float = 1.0, limit: int | None = None) -> list[Arrival]:
    """Arrivals of a JSONL trace, `rate_scale` times as fast. Raises SettingsError naming file and line."""
    try:
        with path.open(encoding="utf-8") as lines:
            arrivals = list(islice(_arrivals(lines, path, rate_scale), limit))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"cannot read trace {path}: {reason}", field="trace", value=str(path)) from error
    if not arrivals:
        raise SettingsError(f"{path} holds no trace entries", field="trace", value=str(path))
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _arrivals(lines: Iterable[str], path: Path, rate_scale: float) -> Iterator[Arrival]:
    blocks: dict[int, tuple[bytes, ...]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            tokens, ids = int(record["input_length"]), [int(id) for id in record["hash_ids"]]
            at, output = float(record["timestamp"]) / 1e3, max(1, int(record["output_length"]))
            if not math.isfinite(at):
                raise ValueError(f"its timestamp is {record['timestamp']}")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            wrong = f"it has no {error}" if isinstance(error, KeyError) else error
            raise SettingsError(f"{path}:{number} is no trace entry: {wrong}", field="trace", value=line) from None
        if not 1 <= tokens <= _LONGEST or not ids:
            raise SettingsError(
                f"{path}:{number}: input_length is {tokens}, hash_ids has {len(ids)} ids",
                field="trace",
                value=line,
                allowed=f"an input_length of 1 to {_LONGEST}, and at least one id",
            )
        # A trace's blocks are larger than ours, by a factor that is the same for all of them.
        share = max(1, round(2 ** round(math.log2(tokens / len(ids) / BLOCK_TOKENS))))
        chain = [part for id in ids for part in _parts(id, share, blocks)]
        yield Arrival(at / rate_scale, tuple(chain[: tokens // BLOCK_TOKENS]), tokens, output)


def agent_traffic(
    *,
    requests: int,
    sessions_per_s: float,
    seed: int = 0,
    max_tokens: int = 192 * 1024,
    applications: int = 6,
) -> list[Arrival]:
    """Agents at work: sessions of turns over growing contexts, a system prompt and tools shared by application.

    Shape of the workload in docs/scaling.md: log-normal contexts of 68K tokens in the mean and 192K at most, answers of
    0.9K, about four fifths of each prompt seen before; a tenth of the sessions fans out into siblings at one time.
    """
    agents = Agents(seed, max_tokens=max_tokens, applications=applications)
    arrivals: list[Arrival] = []
    at = 0.0
    while len(arrivals) < requests:
        at += agents.dice.expovariate(sessions_per_s)
        arrivals += agents.session(at)
    return sorted(arrivals, key=lambda arrival: arrival.at)[:requests]


class Agents:
    """Makes sessions, the same ones for the same seed.

    With a `grain` of N a token of a prompt stands for N: prompts are so much shorter, answers and times are the same.
    """

    def __init__(self, seed: int, *, max_tokens: int = 192 * 1024, applications: int = 6, grain: int = 1) -> None:
        self.dice = dice = random.Random(seed)
        self._grain = grain
        self._max_tokens = max_tokens // grain
        self._shared = [
            [_hash(f"app {app} {block}") for block in range(max(1, dice.randint(60, 160) // grain))]
            for app in range(applications)
        ]
        self._weights = [1 / (rank + 1) for rank in range(applications)]
        self._sessions = 0

    def session(self, start: float) -> Iterator[Arrival]:
        """A conversation: each turn's prompt is the one before, its answer, and what a tool or the user said."""
        self._sessions += 1
        return self._turns(start, f"session {self._sessions}", self.dice.choices(self._shared, self._weights)[0])

    def _turns(self, start: float, name: str, prefix: list[bytes]) -> Iterator[Arrival]:
        dice, grain = self.dice, self._grain
        chain = list(prefix)
        goal = min(self._max_tokens, dice.lognormvariate(math.log(46_000), 0.95) / grain)
        at = start
        siblings = dice.randint(2, 8) if dice.random() < 0.1 else 0
        while True:
            added = int(dice.lognormvariate(math.log(6_000), 1.1) / grain) + 1
            chain += [_hash(f"{name} {len(chain) + place}") for place in range(added // BLOCK_TOKENS)]
            tokens = min(self._max_tokens, len(chain) * BLOCK_TOKENS + added % BLOCK_TOKENS)
            chain = chain[: tokens // BLOCK_TOKENS]
            output = max(1, min(64 * 1024, int(dice.lognormvariate(math.log(350), 1.35))))
            yield Arrival(at, tuple(chain), tokens, output, name)
            for place in range(siblings):
                own = [_hash(f"{name} sibling {place} {block}") for block in range(max(1, 8 // grain))]
                yield Arrival(at + 0.01 * place, (*chain, *own), tokens + 512 // grain, output, name)
            siblings = 0
            if tokens >= goal:
                return
            chain += [_hash(f"{name} {len(chain) + place}") for place in range(output // grain // BLOCK_TOKENS)]
            at += output * 0.03 + dice.expovariate(1 / 8)


def _parts(id: int, share: int, known: dict[int, tuple[bytes, ...]]) -> tuple[bytes, ...]:
    parts = known.get(id)
    if parts is None or len(parts) < share:
        parts = known[id] = tuple(_hash(f"{id} {place}") for place in range(share))
    return parts[:share]


def _hash(name: str) -> bytes:
    return sha256(name.encode()).digest()[:16]
