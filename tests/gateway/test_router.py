"""Routing decisions on paper: warm prompts follow their blocks, cold ones their home, load bounds both."""

from __future__ import annotations

import math
from collections import Counter
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.routing.cost import DEFAULT_PREFILL_SPEED, TierSpeeds, predict
from katydid_gateway.routing.load import REPORT_LAG_S, EngineState, RankReport, RankState
from katydid_gateway.routing.prefix_heat import HALF_LIFE_S
from katydid_gateway.routing.prefix_index import Holder, PrefixIndex
from katydid_gateway.routing.rendezvous import homes
from katydid_gateway.routing.router import WARM_UP_S, RoutedPrompt, Router
from katydid_gateway.routing.tier_index import CacheTier, TierIndex, TierRun

SPEED = 10_000.0


def chain(*parts: str) -> tuple[bytes, ...]:
    """One block a part; equal beginnings give equal blocks."""
    return tuple(sha256("/".join(parts[: place + 1]).encode()).digest() for place in range(len(parts)))


def prompt(*parts: str, affinity: str = "") -> RoutedPrompt:
    return RoutedPrompt(chain(*parts), 64 * len(parts) + 10, affinity)


def router(engines: int = 3, ranks: int = 1) -> Router:
    built = Router()
    for number in range(engines):
        state = EngineState(f"e{number}", [RankState(RankReport(prefill_speed=SPEED)) for _ in range(ranks)])
        state.excluded = ""
        built.engines[state.name] = state
    return built


def conversation(name: str, blocks: int) -> tuple[str, ...]:
    return tuple(f"{name}{place}" for place in range(blocks))


def send(built: Router, asked: RoutedPrompt, request: int = 0, now: float = 0.0) -> str:
    chosen = built.decide(asked, now).chosen
    assert chosen is not None
    built.sent(request, chosen, asked, now)
    return chosen.holder.engine


def test_a_warm_prompt_goes_where_its_blocks_are() -> None:
    built = router()
    built.index.stored(Holder("e1", 0), chain(*conversation("a", 20)))
    decision = built.decide(prompt(*conversation("a", 20)), 0.0)
    assert decision.chosen is not None
    assert decision.chosen.holder == Holder("e1", 0)
    assert decision.chosen.prediction.device_blocks == 20
    assert decision.chosen.prediction.prefill_s == pytest.approx(10 / SPEED)
    others = decision.candidates[1:]
    assert all(c.prediction.prefill_s == pytest.approx((20 * 64 + 10) / SPEED) for c in others)


def test_a_long_queue_outweighs_a_warm_cache_and_a_short_one_does_not() -> None:
    built = router(2)
    built.index.stored(Holder("e0", 0), chain(*conversation("a", 20)))
    built.engines["e0"].ranks[0].report = RankReport(uncached_tokens=1000, prefill_speed=SPEED)
    assert send(built, prompt(*conversation("a", 20))) == "e0"
    built.engines["e0"].ranks[0].report = RankReport(uncached_tokens=5000, prefill_speed=SPEED)
    assert send(built, prompt(*conversation("a", 20)), 1) == "e1"


def test_siblings_follow_before_the_first_event() -> None:
    built = router(4)
    first = send(built, prompt(*conversation("s", 30), "x"))
    assert all(send(built, prompt(*conversation("s", 30), f"y{number}"), number + 1) == first for number in range(3))


def test_a_burst_of_warm_requests_is_spread_evenly() -> None:
    built = router(2)
    for engine in ("e0", "e1"):
        built.index.stored(Holder(engine, 0), chain(*conversation("h", 50)))
    counts = Counter(send(built, prompt(*conversation("h", 50)), number) for number in range(24))
    assert abs(counts["e0"] - counts["e1"]) <= 2


def test_a_cold_prefix_has_a_home_that_stays_when_engines_come_and_go() -> None:
    keys = [prompt(*conversation(f"c{number}", 4)) for number in range(60)]
    before = [router(4).decide(key, 0.0).chosen.holder.engine for key in keys]  # type: ignore[union-attr]
    assert len(set(before)) == 4
    smaller = router(4)
    smaller.engines["e3"].excluded = "draining"
    after = [smaller.decide(key, 0.0).chosen.holder.engine for key in keys]  # type: ignore[union-attr]
    assert [new for old, new in zip(before, after, strict=True) if old != "e3"] == [
        old for old in before if old != "e3"
    ]


def test_overflow_of_a_home_goes_to_one_second_home() -> None:
    key = prompt(*conversation("c", 40), affinity="session-7")
    free = router(5)
    first = send(free, key)
    overflow = set()
    for _ in range(3):
        loaded = router(5)
        loaded.engines[first].ranks[0].report = RankReport(running=50, uncached_tokens=90_000, prefill_speed=SPEED)
        chosen = loaded.decide(key, 0.0)
        assert chosen.chosen is not None
        overflow.add(chosen.chosen.holder.engine)
        assert chosen.chosen.home == 1
    assert len(overflow) == 1
    assert overflow != {first}


def test_a_conversation_key_keeps_different_prompts_together() -> None:
    built = router(5)
    engines = {built.decide(prompt(f"p{n}", affinity="k"), 0.0).chosen.holder for n in range(20)}  # type: ignore[union-attr]
    assert len(engines) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 120), st.randoms(use_true_random=False))
def test_cold_prompts_are_within_the_bound(engines: int, requests: int, random: object) -> None:
    built = router(engines)
    for number in range(requests):
        send(built, prompt(*conversation(f"r{number}", random.randint(1, 5))), number)  # type: ignore[attr-defined]
    loads = [state.ranks[0].requests for state in built.engines.values()]
    assert max(loads) <= 1.25 * requests / engines + 2


def test_ranks_are_candidates_of_their_own() -> None:
    built = router(1, ranks=4)
    built.index.stored(Holder("e0", 2), chain(*conversation("a", 9)))
    decision = built.decide(prompt(*conversation("a", 9)), 0.0)
    assert decision.chosen is not None
    assert decision.chosen.holder.rank == 2
    assert len(decision.candidates) == 4


def test_excluded_engines_are_listed_with_their_reason_and_never_chosen() -> None:
    built = router(2)
    built.engines["e0"].excluded = "draining"
    asked = prompt(*conversation("a", 3))
    decision = built.decide(asked, 0.0, without=("e1",))
    assert decision.chosen is None
    assert {c.holder.engine: c.excluded for c in decision.candidates} == {"e0": "draining", "e1": "left out"}
    assert Router().decide(asked, 0.0).chosen is None


def test_a_restarted_engine_has_nothing() -> None:
    built = router(1)
    built.index.stored(Holder("e0", 0), chain("a"))
    send(built, prompt("a", "b"))
    built.forget("e0")
    assert built.index.depths(chain("a", "b"), 0.0) == {Holder("e0", 0): 0}


def test_blocks_of_the_cache_service_are_priced_by_tier_and_speed() -> None:
    built = router(2)
    for state in built.engines.values():
        state.block_bytes, state.kv_cache_attached = 10_000_000, True
    built.tiers.stored("host-a", CacheTier.DISK, chain(*conversation("a", 10)))
    built.index.stored(Holder("e1", 0), chain(*conversation("a", 4)))
    built.speeds.bytes_per_s[CacheTier.DISK] = 2e9
    chosen = built.decide(prompt(*conversation("a", 10)), 0.0).chosen
    assert chosen is not None
    assert (chosen.holder.engine, chosen.prediction.device_blocks, chosen.prediction.cached_blocks) == ("e1", 4, 6)
    assert chosen.prediction.fetch_s == pytest.approx(6 * 1e7 / 2e9)
    built.speeds.bytes_per_s[CacheTier.DISK] = 1e6
    slow = built.decide(prompt(*conversation("a", 10)), 0.0).chosen
    assert slow is not None
    assert slow.prediction.fetch_s == 0
    assert slow.prediction.uncached_tokens == 6 * 64 + 10


def test_an_engine_without_the_cache_service_fetches_nothing() -> None:
    state = EngineState("e", [RankState()], block_bytes=1)
    terms = predict(state, state.ranks[0], 640, 0, [TierRun(CacheTier.MEMORY, 10)], TierSpeeds())
    assert (terms.fetch_s, terms.cached_blocks, terms.prefill_s) == (0, 0, 640 / DEFAULT_PREFILL_SPEED)


def test_a_prompt_held_whole_still_computes_a_token() -> None:
    state = EngineState("e", [RankState(RankReport(prefill_speed=SPEED))])
    assert predict(state, state.ranks[0], 640, 10, [], TierSpeeds()).uncached_tokens == 1


def test_what_is_fetched_stands_behind_what_the_engine_holds() -> None:
    state = EngineState("e", [RankState(RankReport(prefill_speed=SPEED))], block_bytes=1, kv_cache_attached=True)
    terms = predict(state, state.ranks[0], 1280, 5, [TierRun(CacheTier.MEMORY, 10)], TierSpeeds())
    assert (terms.cached_blocks, terms.uncached_tokens) == (10, 5 * 64)


def test_measured_speeds_move_the_average() -> None:
    speeds = TierSpeeds({CacheTier.MEMORY: 5e9})
    speeds.measured(CacheTier.MEMORY, 1_000_000_000, 0.1)
    assert speeds.bytes_per_s[CacheTier.MEMORY] == pytest.approx(6e9)
    for _ in range(60):
        speeds.measured(CacheTier.MEMORY, 1_000_000_000, 0.1)
    assert speeds.bytes_per_s[CacheTier.MEMORY] == pytest.approx(1e10, rel=0.01)
    speeds.measured(CacheTier.MEMORY, 0, 0.1)
    speeds.measured(CacheTier.MEMORY, 10, 0.0)
    assert speeds.bytes_per_s[CacheTier.MEMORY] == pytest.approx(1e10, rel=0.01)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20), st.floats(0, 100)), max_size=20),
    st.floats(0, 200),
)
def test_a_rank_is_as_late_as_the_first_token_that_should_have_come_first(
    requests: list[tuple[float, float, float]], now: float
) -> None:
    """Requests are (sent at, expected after, first token so long after that); who was overtaken is not counted."""
    rank = RankState()
    owed: list[float] = []
    for number, (sent, expected_s, took_s) in enumerate(requests):
        rank.sent(number, 10, sent, expected_s)
        if sent + took_s <= now:
            rank.settled(number)
            owed.clear()
        else:
            owed.append(now - (sent + 2 * expected_s + 1.0))
    assert rank.late_s(now) == pytest.approx(max([0.0, *owed]))
    if all(took_s <= 2 * expected_s + 1.0 for _, expected_s, took_s in requests):
        assert rank.late_s(now) <= 1e-9, "nothing is late that came in time"


def test_one_that_is_overtaken_does_not_make_a_rank_late() -> None:
    """It waits for pages, or lets others go first; one that ended before it came says nothing of either."""
    rank = RankState()
    for request in (1, 2, 3):
        rank.sent(request, 10, 0.0, 0.5)
    assert rank.late_s(10.0) == 8.0
    rank.ended(3)
    assert rank.late_s(10.0) == 8.0
    rank.settled(2)
    assert rank.late_s(10.0) == 0.0
    rank.sent(4, 10, 10.0, 0.5)
    assert rank.late_s(20.0) == 8.0


@pytest.mark.parametrize("blocks", [12, 100, 1000])
def test_a_warm_engine_without_a_free_place_does_not_get_everything(blocks: int) -> None:
    """It holds the prefix of all; sixteen answers take all its places and do not end, the others wait behind them. What
    waits there has few tokens to be computed, so that its queue looks short."""
    built = router(2)
    known = conversation("s", blocks)
    built.index.stored(Holder("e0", 0), chain(*known))
    sent: Counter[str] = Counter()
    for number in range(400):
        now = number * 0.1
        asked = prompt(*known)
        chosen = built.decide(asked, now).chosen
        assert chosen is not None
        built.sent(number, chosen, asked, now, chosen.prediction.expected_s)
        built.holds(number, chosen.holder)
        engine, rank = chosen.holder.engine, built.engines[chosen.holder.engine].ranks[0]
        sent[engine] += 1
        if sent[engine] <= 16:
            built.settled(number, chosen.holder)
        else:
            waiting = sent[engine] - 16
            report = RankReport(running=16, waiting=waiting, uncached_tokens=10 * waiting, prefill_speed=SPEED)
            rank.reported(report, now + 2 * REPORT_LAG_S)
    assert min(sent["e0"], sent["e1"]) >= 100


def test_a_home_with_a_little_to_do_keeps_its_prompts() -> None:
    """Waiting for less than the prompt's own work is no reason to give up what its successors will find there."""
    built, asked = router(3), prompt(*conversation("a", 20))
    home = built.decide(asked, 0.0).chosen
    assert home is not None
    rank = built.engines[home.holder.engine].ranks[0]
    for waiting, stays in ((100, True), (1200, True), (4000, False)):
        rank.report = RankReport(uncached_tokens=waiting, prefill_speed=SPEED)
        chosen = built.decide(asked, 0.0).chosen
        assert chosen is not None
        assert (chosen.holder == home.holder) is stays, waiting


def test_a_new_engine_gets_its_share_of_cold_prompts_and_no_more() -> None:
    now = 10 * WARM_UP_S
    for own, expected in ((0, {"e2"}), (1, {"e2"}), (2, {"e0", "e1", "e2"})):
        built = router(3)
        built.engines["e2"].since = now - 1
        for name, requests in (("e0", 1), ("e1", 1), ("e2", own)):
            built.engines[name].ranks[0].others = requests
        found = set()
        for number in range(40):
            chosen = built.decide(prompt(*conversation(f"cold {number}", 4)), now).chosen
            assert chosen is not None
            found.add(chosen.holder.engine)
        assert found == expected, own


def test_a_hot_prefix_is_kept_on_as_many_homes_as_its_work_needs() -> None:
    """Fewer would be late, more would compute and hold it for nothing."""
    asked = prompt(*conversation("hot", 1))
    for wanted in (1, 2, 3):
        built = router(5)
        # An engine gives a prefix half of its speed.
        built.heat.add(asked.chain, int((wanted - 0.5) * SPEED / 2 * HALF_LIFE_S / math.log(2)), 0.0)
        key = built.heat.boundary(asked.chain, SPEED / 2, 0.0).block
        near = homes(key, [Holder(f"e{number}", 0) for number in range(5)])[:wanted]
        used = set()
        for request in range(2 * wanted):
            chosen = built.decide(asked, 0.0).chosen
            assert chosen is not None
            used.add(chosen.holder)
            built.holds(request, chosen.holder)
        assert used == set(near)


def test_what_prompts_ask_for_is_forgotten_last() -> None:
    """By either index: a long conversation's blocks were stored long ago."""
    room = 240 * 10
    built = router(1)
    built.index, built.tiers = PrefixIndex(room), TierIndex(room)
    built.engines["e0"].kv_cache_attached = True
    old, other, new = (conversation(name, 4) for name in ("old", "other", "new"))
    for name in (old, other):
        built.index.stored(Holder("e0", 0), chain(*name))
        built.tiers.stored("i", CacheTier.MEMORY, chain(*name))
    send(built, prompt(*old))
    built.index.stored(Holder("e0", 0), chain(*new))
    built.tiers.stored("i", CacheTier.MEMORY, chain(*new))
    assert built.index.depths(chain(*old), 0.0)[Holder("e0", 0)] == 4
    assert built.index.depths(chain(*other), 0.0)[Holder("e0", 0)] < 4
    assert built.tiers.runs(chain(*old), 0) == [TierRun(CacheTier.MEMORY, 4)]
    assert built.tiers.runs(chain(*other), 0) != [TierRun(CacheTier.MEMORY, 4)]


def test_a_report_that_cannot_know_of_a_request_is_all_of_others() -> None:
    rank = RankState()
    rank.sent(1, 500, 1.0)
    rank.own.add(1)
    rank.reported(RankReport(running=3), 1.0 + REPORT_LAG_S / 2)
    assert (rank.others, rank.requests) == (3, 4)
    rank.reported(RankReport(running=4), 1.0 + 2 * REPORT_LAG_S)
    assert (rank.others, rank.requests) == (3, 4)


def test_reports_replace_what_was_sent_before_them() -> None:
    rank = RankState()
    rank.sent(1, 500, 0.0)
    rank.sent(2, 300, REPORT_LAG_S * 2)
    assert (rank.queued_tokens, rank.requests) == (800, 2)
    rank.reported(RankReport(running=1, uncached_tokens=500), REPORT_LAG_S * 2.5)
    assert (rank.queued_tokens, rank.requests) == (800, 2)
    rank.settled(2)
    rank.settled(2)
    assert (rank.queued_tokens, rank.requests) == (500, 1)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=8), st.sets(st.text(max_size=3), min_size=2, max_size=8), st.data())
def test_rendezvous_keeps_the_order_of_those_that_stay(key: bytes, names: set[str], data: st.DataObject) -> None:
    ranking = homes(key, names)
    assert sorted(ranking) == sorted(names)
    gone = data.draw(st.sampled_from(sorted(names)))
    assert homes(key, names - {gone}) == [name for name in ranking if name != gone]
