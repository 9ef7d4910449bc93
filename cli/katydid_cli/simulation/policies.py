"""Ways to choose an engine: Katydid's own router, as it runs in the gateway, and what it is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from katydid_gateway.routing.load import EngineState, RankReport, RankState
from katydid_gateway.routing.prefix_index import Holder
from katydid_gateway.routing.router import Candidate, RoutedPrompt, Router
from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_cli.simulation.engine_model import EngineModel, PrefixCache
from katydid_cli.simulation.trace import Arrival

__all__ = ["POLICIES", "CacheAware", "KatydidRouter", "NearOracle", "Oracle", "Policy", "PowerOfTwo", "RoundRobin"]


class Policy(Protocol):
    """Chooses an engine for each arrival, and hears what a gateway hears."""

    def choose(self, arrival: Arrival, now: float) -> str: ...

    def first_token(self, arrival: Arrival, engine: str) -> None: ...

    def ended(self, engine: str) -> None: ...

    def blocks(self, engine: str, stored: list[bytes], removed: list[bytes]) -> None: ...

    def report(self, now: float) -> None:
        """Engines report their load now."""


class _Counting:
    """A policy that knows how many requests it has in flight where."""

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        self.in_flight = {engine.name: 0 for engine in engines}

    def first_token(self, arrival: Arrival, engine: str) -> None: ...

    def ended(self, engine: str) -> None:
        self.in_flight[engine] -= 1

    def blocks(self, engine: str, stored: list[bytes], removed: list[bytes]) -> None: ...

    def report(self, now: float) -> None: ...

    def _sent(self, engine: str) -> str:
        self.in_flight[engine] += 1
        return engine


class RoundRobin(_Counting):
    """One after the other."""

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        super().__init__(engines)
        self._next = 0

    def choose(self, _arrival: Arrival, _now: float) -> str:
        names = list(self.in_flight)
        self._next += 1
        return self._sent(names[self._next % len(names)])


class PowerOfTwo(_Counting):
    """The one of two random engines with fewer requests in flight."""

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        super().__init__(engines)
        self._dice = random.Random(0)

    def choose(self, _arrival: Arrival, _now: float) -> str:
        pair = self._dice.sample(list(self.in_flight), min(2, len(self.in_flight)))
        return self._sent(min(pair, key=self.in_flight.__getitem__))


class CacheAware(_Counting):
    """SMG's default, with exact block events: the longest match, unless requests in flight are out of balance
    (more than 64 and more than 1.5 times between the fullest and the emptiest); without a match, the emptiest."""

    ABSOLUTE, RELATIVE = 64, 1.5

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        super().__init__(engines)
        self._held = {engine.name: PrefixCache(None) for engine in engines}

    def choose(self, arrival: Arrival, _now: float) -> str:
        most, least = max(self.in_flight.values()), min(self.in_flight.values())
        if most - least > self.ABSOLUTE and most > self.RELATIVE * least:
            return self._sent(min(self.in_flight, key=self.in_flight.__getitem__))
        depths = {name: held.depth(arrival.chain) for name, held in self._held.items()}
        deepest = max(depths.values())
        if not deepest:
            return self._sent(min(self.in_flight, key=self.in_flight.__getitem__))
        holders = [name for name, depth in depths.items() if depth == deepest]
        return self._sent(min(holders, key=self.in_flight.__getitem__))

    def blocks(self, engine: str, stored: list[bytes], removed: list[bytes]) -> None:
        self._held[engine].put(stored)
        self._held[engine].drop(removed)


class KatydidRouter:
    """The gateway's router, fed with what a gateway gets: reports, block events, first tokens."""

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        self._engines: dict[str, EngineModel] = {}
        self.router = Router()
        for engine in engines:
            self.add(engine)
        self._sent: dict[int, tuple[int, Candidate]] = {}
        self._books = 0

    def add(self, engine: EngineModel) -> None:
        """An engine is up."""
        rank = RankState(RankReport(prefill_speed=engine.prefill_tokens_per_s))
        self._engines[engine.name] = engine
        self.router.engines[engine.name] = EngineState(engine.name, [rank], excluded="", well=True)

    def drain(self, engine: str) -> None:
        """It takes nothing more."""
        state = self.router.engines[engine]
        state.excluded, state.draining = "draining", True

    def remove(self, engine: str) -> None:
        """It is gone."""
        self.router.forget(engine)
        del self.router.engines[engine], self._engines[engine]

    def choose(self, arrival: Arrival, now: float) -> str:
        prompt = RoutedPrompt(arrival.chain, arrival.prompt_tokens, arrival.session)
        chosen = self.router.decide(prompt, now).chosen
        assert chosen is not None, "no simulated engine is ever excluded"
        self._books += 1
        self._sent[id(arrival)] = (self._books, chosen)
        self.router.sent(self._books, chosen, prompt, now)
        return chosen.holder.engine

    def first_token(self, arrival: Arrival, _engine: str) -> None:
        book, chosen = self._sent.pop(id(arrival))
        self.router.settled(book, chosen.holder)

    def ended(self, engine: str) -> None: ...

    def blocks(self, engine: str, stored: list[bytes], removed: list[bytes]) -> None:
        holder = Holder(engine, 0)
        self.router.index.stored(holder, stored)
        self.router.index.removed(holder, removed)

    def report(self, now: float) -> None:
        for name, engine in self._engines.items():
            report = RankReport(
                running=len(engine.running),
                waiting=len(engine.waiting),
                uncached_tokens=engine.queued_tokens,
                prefill_speed=engine.prefill_tokens_per_s,
                decode_speed=engine.decode_tokens_per_s,
                free_pages=max(0, engine.speeds.cache_tokens - engine.held_tokens) // BLOCK_TOKENS,
                total_pages=engine.speeds.cache_tokens // BLOCK_TOKENS,
            )
            self.router.engines[name].reported({0: report}, now)


class Oracle:
    """Knows every engine's caches and queue at this moment exactly, and takes the earliest first token; its engines'
    caches are infinite. No gateway can know this; it is the measure of how much is left to win."""

    infinite_cache = True

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        self._engines = engines

    def choose(self, arrival: Arrival, _now: float) -> str:
        def first_token_at(engine: EngineModel) -> tuple[float, int]:
            uncached = max(1, arrival.prompt_tokens - engine.cache.depth(arrival.chain) * 64)
            tokens = engine.queued_tokens + uncached
            speeds = engine.speeds
            steps = -(-tokens // speeds.budget_tokens)
            own_s = speeds.step_s + speeds.step_per_request_s * len(engine.running)
            return engine.now + steps * own_s + tokens / speeds.prefill_tokens_per_s, engine.requests

        return min(self._engines, key=first_token_at).name

    def first_token(self, arrival: Arrival, engine: str) -> None: ...

    def ended(self, engine: str) -> None: ...

    def blocks(self, engine: str, stored: list[bytes], removed: list[bytes]) -> None: ...

    def report(self, now: float) -> None: ...


class NearOracle(Oracle):
    """The same knowledge over the caches that engines have: what is left to win by routing alone."""

    infinite_cache = False


POLICIES: Mapping[str, Callable[[Sequence[EngineModel]], Policy]] = {
    "katydid": KatydidRouter,
    "cache-aware": CacheAware,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
    "near-oracle": NearOracle,
    "oracle": Oracle,
}
