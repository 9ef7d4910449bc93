"""Chooses the rank with the lowest predicted time to first token, and a prefix's home where none has an advantage.

A warm prompt goes where it is fastest; among equals, to the rank with the fewest requests. A cold prompt gains nothing
now, but its successors will: it goes to its rendezvous home, or to the next one when the home carries more than its
bounded share (Mirrokni et al., consistent hashing with bounded loads), so overflow too stays on a stable engine.
An engine that computes prompts alone is priced together with the best engine that can go on from there (pairs.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from katydid_gateway.routing.breaker import FAILING
from katydid_gateway.routing.cost import DEFAULT_PREFILL_SPEED, Prediction, TierSpeeds, predict
from katydid_gateway.routing.load import EngineState, RankReport, RankState
from katydid_gateway.routing.pairs import COMPUTES_PROMPTS, CONTINUES, after_hand_off
from katydid_gateway.routing.prefix_heat import Boundary, PrefixHeat
from katydid_gateway.routing.prefix_index import Holder, PrefixIndex
from katydid_gateway.routing.rendezvous import homes
from katydid_gateway.routing.tier_index import TierIndex, TierRun

__all__ = ["ANOTHER", "Candidate", "Decision", "RoutedPrompt", "Router"]

ANOTHER = "one more"
"""Name of the engine that is imagined when `decide` is asked what one more would change."""

# Predictions this close are one: 5 % and 2 ms.
_NEAR_SHARE = 1.05
_NEAR_S = 0.002
# Waiting this share of the work that a warm cache saves is worth it: computing it again would delay others. From 0.25
# to 1, agents and chats alike differ by 2 % (`katydid simulate`); beyond, agents lose.
_PATIENCE = 0.5
# A home may carry a quarter more than the mean.
_BOUND = 1.25
# A prefix is one engine's while it keeps it busy for less than this share of its time.
_GROUP_SHARE = 0.5
# For so long an engine that joined a running fleet is given cold prompts first.
WARM_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What routing sees of a prompt: its block hashes, its length, and the key its caller groups it by, or ""."""

    chain: tuple[bytes, ...]
    tokens: int
    affinity: str = ""
    digest: bytes = b""


@dataclass(slots=True)
class Candidate:
    """One rank with the terms of its prediction; `home` is its place in the prefix's ranking, 0 for the home.

    With a `partner` it computes the prompt alone, and the partner needs `hand_off_s` to go on from there: it holds
    `partner_blocks` of the prompt now.
    """

    holder: Holder
    prediction: Prediction
    requests: int
    home: int
    excluded: str = ""
    partner: Holder | None = None
    hand_off_s: float = 0.0
    partner_blocks: int = 0
    fresh: bool = False

    @property
    def cost_s(self) -> float:
        """Seconds until the answer flows: the time to first token, and to the second where another engine makes it."""
        return self.prediction.ttft_s + self.hand_off_s


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
    heat: PrefixHeat = field(default_factory=PrefixHeat)
    sent_tokens: int = 0
    """Prompt tokens sent so far that had to be computed, as predicted."""

    def decide(
        self,
        prompt: RoutedPrompt,
        now: float,
        without: Collection[str] = (),
        *,
        after: str | None = None,
        another: bool = False,
    ) -> Decision:
        """Where the prompt should go; changes nothing. `without` names engines to leave out.

        With `after` the answer has begun: the engine of that name hands it off, or "" for none that still has it.
        With `another` an idle engine with empty caches is a candidate too.
        """
        engines = dict(self.engines)
        if another:
            engines[ANOTHER] = self._imagined(now)
        terms = self._terms(engines, prompt, now, after)
        candidates = self._candidates(
            engines, prompt, terms, now, without, COMPUTES_PROMPTS if after is None else CONTINUES
        )
        able = [candidate for candidate in candidates if not candidate.excluded]
        if not able:
            # Roles are the operator's wish, and one that fails requests is better than none.
            any_role = self._candidates(engines, prompt, terms, now, without, None)
            able = [candidate for candidate in any_role if not candidate.excluded]
            if not able:
                return Decision(tuple(candidates), "no engine can take it")
            candidates = any_role
        boundary = self._boundary(prompt, able, now)
        key = _home_key(prompt, boundary)
        place = {holder: number for number, holder in enumerate(homes(key, [c.holder for c in able]))}
        for candidate in able:
            candidate.home = place[candidate.holder]
        chosen, reason = _choose(able, boundary.homes if boundary else 1)
        rest = sorted((c for c in able if c is not chosen), key=lambda c: (c.cost_s, c.home))
        return Decision((chosen, *rest, *(c for c in candidates if c.excluded)), reason)

    def sent(
        self,
        request: int,
        candidate: Candidate,
        prompt: RoutedPrompt,
        now: float,
        expected_s: float | None = None,
    ) -> None:
        """The request goes to `candidate`: count it and expect its blocks there, and its first token after so long."""
        holder, prediction = candidate.holder, candidate.prediction
        rank = self.engines[holder.engine].ranks[holder.rank]
        rank.sent(request, prediction.uncached_tokens, now, expected_s)
        self.sent_tokens += prediction.uncached_tokens
        self.heat.add(prompt.chain, prediction.uncached_tokens, now)
        self.index.touch(prompt.chain)
        self.tiers.touch(prompt.chain)
        self.index.predict(holder, prompt.chain[prediction.device_blocks :], now)

    @property
    def size_bytes(self) -> int:
        """Memory of what it knows of blocks."""
        return self.index.size_bytes + self.tiers.size_bytes + self.heat.size_bytes

    def settled(self, request: int, holder: Holder) -> None:
        """The request has its first token."""
        engine = self.engines.get(holder.engine)
        if engine is not None and holder.rank < len(engine.ranks):
            engine.ranks[holder.rank].settled(request)

    def holds(self, request: int, holder: Holder) -> None:
        """The request, which was sent, is counted until it has `ended`."""
        self.engines[holder.engine].ranks[holder.rank].own.add(request)

    def ended(self, request: int, holder: Holder) -> None:
        """The request has ended, or its rank has."""
        engine = self.engines.get(holder.engine)
        if engine is not None and holder.rank < len(engine.ranks):
            engine.ranks[holder.rank].ended(request)

    def forget(self, engine: str) -> None:
        """The engine lost its caches: it restarted or is gone."""
        for rank in range(len(self.engines[engine].ranks)):
            self.index.cleared(Holder(engine, rank))

    def _terms(
        self, engines: Mapping[str, EngineState], prompt: RoutedPrompt, now: float, after: str | None
    ) -> dict[Holder, Prediction]:
        """Every rank's own prediction for the prompt."""
        depths = self.index.depths(prompt.chain, now)
        giver = engines.get(after) if after else None
        known: dict[tuple[str, int], list[TierRun]] = {}
        terms = {}
        for engine in engines.values():
            for number, rank in enumerate(engine.ranks):
                holder = Holder(engine.name, number)
                depth, late_s = depths.get(holder, 0), rank.late_s(now)
                if giver is not None:
                    terms[holder] = after_hand_off(
                        giver, engine, rank, prompt.tokens, len(prompt.chain), depth, self.speeds, late_s
                    )
                    continue
                place = engine.near, depth
                if place not in known:
                    known[place] = self.tiers.runs(prompt.chain, depth, engine.near) if engine.kv_cache_attached else []
                terms[holder] = predict(engine, rank, prompt.tokens, depth, known[place], self.speeds, late_s)
        return terms

    def _candidates(
        self,
        engines: Mapping[str, EngineState],
        prompt: RoutedPrompt,
        terms: Mapping[Holder, Prediction],
        now: float,
        without: Collection[str],
        roles: Mapping[str, str] | None,
    ) -> list[Candidate]:
        """All ranks; `roles` tells why an engine of a role does not do, None where every engine will that there is."""
        joined = [engine.since for engine in engines.values() if not engine.excluded]
        settled = min(joined, default=now) < now - WARM_UP_S
        candidates = []
        for engine in engines.values():
            unfit = ""
            if roles is not None:
                unfit = FAILING if engine.breaker.is_open(now) else roles.get(engine.role, "")
            excluded = "left out" if engine.name in without else engine.excluded or unfit
            fresh = settled and now - engine.since < WARM_UP_S
            for number, rank in enumerate(engine.ranks):
                holder = Holder(engine.name, number)
                candidate = Candidate(holder, terms[holder], rank.requests, 0, excluded, fresh=fresh)
                if roles is COMPUTES_PROMPTS and engine.role == "prefill" and not excluded:
                    candidate = self._paired(engines, prompt, candidate, terms, without)
                candidates.append(candidate)
        return candidates

    def _paired(
        self,
        engines: Mapping[str, EngineState],
        prompt: RoutedPrompt,
        candidate: Candidate,
        terms: Mapping[Holder, Prediction],
        without: Collection[str],
    ) -> Candidate:
        """The candidate with the partner that can go on first, or excluded without one."""
        giver = engines[candidate.holder.engine]
        partners = []
        for engine in engines.values():
            if engine.excluded or engine.name in without or engine.role in CONTINUES:
                continue
            for number, rank in enumerate(engine.ranks):
                holder = Holder(engine.name, number)
                depth, late_s = terms[holder].device_blocks, terms[holder].late_s
                after = after_hand_off(
                    giver, engine, rank, prompt.tokens, len(prompt.chain), depth, self.speeds, late_s
                )
                partners.append((after.ttft_s, holder, depth))
        if not partners:
            return replace(candidate, excluded="no engine could go on from its prompts")
        hand_off_s, partner, blocks = min(partners)
        return replace(candidate, partner=partner, hand_off_s=hand_off_s, partner_blocks=blocks)

    def _boundary(self, prompt: RoutedPrompt, able: Sequence[Candidate], now: float) -> Boundary | None:
        if not prompt.chain:
            return None
        speeds = [self.engines[c.holder.engine] for c in able if c.holder.engine in self.engines]
        ranks = [rank.report.prefill_speed or DEFAULT_PREFILL_SPEED for engine in speeds for rank in engine.ranks]
        share = _GROUP_SHARE * sum(ranks) / len(ranks) if ranks else DEFAULT_PREFILL_SPEED
        return self.heat.boundary(prompt.chain, share, now)

    def _imagined(self, now: float) -> EngineState:
        """An engine like the others that has nothing to do and knows nothing."""
        others = [engine for engine in self.engines.values() if not engine.excluded]
        speeds = [rank.report.prefill_speed for engine in others for rank in engine.ranks if rank.report.prefill_speed]
        speed = sum(speeds) / len(speeds) if speeds else 0.0
        return EngineState(
            ANOTHER,
            [RankState(RankReport(prefill_speed=speed))],
            block_bytes=max((engine.block_bytes for engine in others), default=0),
            kv_cache_attached=any(engine.kv_cache_attached for engine in others),
            excluded="",
            well=True,
            since=now,
        )


def _home_key(prompt: RoutedPrompt, boundary: Boundary | None) -> bytes:
    """What a prefix is grouped by: the caller's key, else the boundary its work calls for, else itself."""
    if prompt.affinity:
        return sha256(b"affinity:" + prompt.affinity.encode()).digest()
    return boundary.block if boundary is not None else prompt.digest


def _choose(able: Sequence[Candidate], wanted_homes: int) -> tuple[Candidate, str]:
    if len(able) == 1:
        return able[0], "the only one that can take it"
    fastest = min(able, key=lambda candidate: candidate.cost_s)
    limit_s = fastest.cost_s * _NEAR_SHARE + _NEAR_S
    near = [
        c
        for c in able
        if c.cost_s <= limit_s + _PATIENCE * max(0.0, fastest.prediction.prefill_s - c.prediction.prefill_s)
    ]
    deepest = max(candidate.prediction.device_blocks for candidate in near)
    if deepest:
        holders = [c for c in near if c.prediction.device_blocks == deepest]
        chosen = min(holders, key=lambda c: (c.requests, c.home))
        return chosen, f"lowest predicted TTFT; it holds {deepest} blocks of the prompt"
    return _home(able, wanted_homes)


def _home(able: Sequence[Candidate], wanted_homes: int) -> tuple[Candidate, str]:
    """The first home within its bounded share of queued work and of requests; of a hot prefix, the emptiest of its
    homes; while an engine is new, that one."""
    mean_wait_s = sum(c.prediction.queue_s + c.prediction.pressure_s for c in able) / len(able)
    mean_requests = sum(c.requests for c in able) / len(able)

    def within(candidate: Candidate) -> bool:
        own_s = candidate.prediction.fetch_s + candidate.prediction.prefill_s
        return (
            candidate.prediction.queue_s + candidate.prediction.pressure_s <= _BOUND * mean_wait_s + own_s
            and candidate.requests <= _BOUND * mean_requests + 1
        )

    # A home that can hand its prompts to nobody near comes after all others.
    dear_s = min(c.hand_off_s for c in able) * _BOUND + _NEAR_S
    ranked = sorted(able, key=lambda c: (c.hand_off_s > dear_s, c.home))
    fresh = [c for c in ranked if c.fresh and c.requests <= mean_requests]
    if fresh and (chosen := min(fresh, key=lambda c: c.requests)) and within(chosen):
        return chosen, "no engine has an advantage; this one is new and gets its share to warm up"
    hot = [c for c in ranked[:wanted_homes] if within(c)] if wanted_homes > 1 else []
    if hot:
        chosen = min(hot, key=lambda c: (c.requests, c.home))
        return chosen, f"no engine has an advantage; one of {wanted_homes} homes of this hot prefix"
    for candidate in ranked:
        if within(candidate):
            name = "home" if candidate.home == 0 else f"home number {candidate.home + 1}, the ones before it are full"
            return candidate, f"no engine has an advantage; {name} of this prefix"
    return min(able, key=lambda c: (c.cost_s, c.home)), "every home is full; lowest predicted TTFT"
