"""Chooses the rank with the lowest predicted time to first token, and a prefix's home where none has an advantage.

A warm prompt goes where it is fastest; among equals, to the rank with the fewest requests. A cold prompt gains nothing
now, but its successors will: it goes to its rendezvous home, or to the next one when the home carries more than its
bounded share (Mirrokni et al., consistent hashing with bounded loads), so overflow too stays on a stable engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from katydid_gateway.routing.cost import Prediction, TierSpeeds, predict
from katydid_gateway.routing.load import EngineState
from katydid_gateway.routing.prefix_index import Holder, PrefixIndex, TierIndex
from katydid_gateway.routing.rendezvous import homes

__all__ = ["Candidate", "Decision", "RoutedPrompt", "Router"]

# Predictions this close are one: 5 % and 2 ms.
_NEAR_SHARE = 1.05
_NEAR_S = 0.002
# Waiting this share of the work that a warm cache saves is worth it: computing it again would delay others. From 0.25
# to 1, agents and chats alike differ by 2 % (`katydid simulate`); beyond, agents lose.
_PATIENCE = 0.5
# A home may carry a quarter more than the mean.
_BOUND = 1.25


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What routing sees of a prompt: its block hashes, its length, and the key its caller groups it by, or ""."""

    chain: tuple[bytes, ...]
    tokens: int
    affinity: str = ""
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank with the terms of its prediction; `home` is its place in the prefix's ranking, 0 for the home."""

    holder: Holder
    prediction: Prediction
    requests: int
    home: int
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """All candidates, the chosen one first, and why; `chosen` is None when every one is excluded."""

    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def chosen(self) -> Candidate | None:
        return self.candidates[0] if self.candidates and not self.candidates[0].excluded else None


@dataclass(slots=True)
class Router:
    """Engines, their caches and the cache service's as known now, and the choice among them."""

    engines: dict[str, EngineState] = field(default_factory=dict)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    tiers: TierIndex = field(default_factory=TierIndex)
    speeds: TierSpeeds = field(default_factory=TierSpeeds)
    sent_tokens: int = 0
    """Prompt tokens sent so far that had to be computed, as predicted."""

    def decide(self, prompt: RoutedPrompt, now: float, without: Collection[str] = ()) -> Decision:
        """Where the prompt should go; changes nothing. `without` names engines to leave out."""
        candidates = self._candidates(prompt, now, without)
        able = [candidate for candidate in candidates if not candidate.excluded]
        if not able:
            return Decision(tuple(candidates), "no engine can take it")
        chosen, reason = _choose(able)
        rest = sorted((c for c in able if c is not chosen), key=lambda c: (c.prediction.ttft_s, c.home))
        return Decision((chosen, *rest, *(c for c in candidates if c.excluded)), reason)

    def sent(self, request: int, candidate: Candidate, prompt: RoutedPrompt, now: float) -> None:
        """The request goes to `candidate`: count it and expect its blocks there."""
        holder = candidate.holder
        rank = self.engines[holder.engine].ranks[holder.rank]
        rank.sent(request, candidate.prediction.uncached_tokens, now)
        self.sent_tokens += candidate.prediction.uncached_tokens
        self.index.predict(holder, prompt.chain[candidate.prediction.device_blocks :], now)

    def settled(self, request: int, holder: Holder) -> None:
        """The request has its first token, or has ended without one."""
        engine = self.engines.get(holder.engine)
        if engine is not None and holder.rank < len(engine.ranks):
            engine.ranks[holder.rank].settled(request)

    def forget(self, engine: str) -> None:
        """The engine lost its caches: it restarted or is gone."""
        for rank in range(len(self.engines[engine].ranks)):
            self.index.cleared(Holder(engine, rank))

    def _candidates(self, prompt: RoutedPrompt, now: float, without: Collection[str]) -> list[Candidate]:
        depths = self.index.depths(prompt.chain, now)
        key = _home_key(prompt, max(depths.values(), default=0))
        candidates = []
        for engine in self.engines.values():
            excluded = "left out" if engine.name in without else engine.excluded
            for number, rank in enumerate(engine.ranks):
                holder = Holder(engine.name, number)
                depth = depths.get(holder, 0)
                run = self.tiers.run(prompt.chain, depth) if engine.kv_cache_attached else []
                prediction = predict(engine, rank, prompt.tokens, depth, run, self.speeds)
                candidates.append(Candidate(holder, prediction, rank.requests, 0, excluded))
        ranking = homes(key, [c.holder for c in candidates if not c.excluded])
        place = {holder: number for number, holder in enumerate(ranking)}
        return [replace(c, home=place.get(c.holder, len(place))) for c in candidates]


def _home_key(prompt: RoutedPrompt, deepest_known: int) -> bytes:
    """What a prefix is grouped by: the caller's key, else the deepest block others are known to share, else itself."""
    if prompt.affinity:
        return sha256(b"affinity:" + prompt.affinity.encode()).digest()
    if prompt.chain:
        return prompt.chain[(deepest_known or len(prompt.chain)) - 1]
    return prompt.digest


def _choose(able: Sequence[Candidate]) -> tuple[Candidate, str]:
    if len(able) == 1:
        return able[0], "the only one that can take it"
    fastest = min((candidate.prediction for candidate in able), key=lambda prediction: prediction.ttft_s)
    limit_s = fastest.ttft_s * _NEAR_SHARE + _NEAR_S
    near = [
        c
        for c in able
        if c.prediction.ttft_s <= limit_s + _PATIENCE * max(0.0, fastest.prefill_s - c.prediction.prefill_s)
    ]
    deepest = max(candidate.prediction.device_blocks for candidate in near)
    if deepest:
        holders = [c for c in near if c.prediction.device_blocks == deepest]
        chosen = min(holders, key=lambda c: (c.requests, c.home))
        return chosen, f"lowest predicted TTFT; it holds {deepest} blocks of the prompt"
    return _home(able)


def _home(able: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The first home within its bounded share of queued work and of requests."""
    mean_queue_s = sum(c.prediction.queue_s for c in able) / len(able)
    mean_requests = sum(c.requests for c in able) / len(able)
    for candidate in sorted(able, key=lambda c: c.home):
        own_s = candidate.prediction.fetch_s + candidate.prediction.prefill_s
        if (
            candidate.prediction.queue_s <= _BOUND * mean_queue_s + own_s
            and candidate.requests <= _BOUND * mean_requests + 1
        ):
            name = "home" if candidate.home == 0 else f"home number {candidate.home + 1}, the ones before it are full"
            return candidate, f"no engine has an advantage; {name} of this prefix"
    return min(able, key=lambda c: (c.prediction.ttft_s, c.home)), "every home is full; lowest predicted TTFT"
