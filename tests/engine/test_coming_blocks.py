"""Requests whose blocks another engine computes: what is asked for, for how long, and who makes room for whom."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from katydid_engine.messages import KvCancel, KvFound, KvLookup
from katydid_engine.request import FinishReason, Request, Sampling

from tests.engine.paper_runner import PAGE
from tests.engine.scheduler_rig import STREAMS, Rig

WITHIN_S = 2.0


def attached(**config: object) -> Rig:
    rig = Rig(slots=2, **config)  # type: ignore[arg-type]
    rig.scheduler.kv.set_attached(True)
    return rig


def asked(rig: Rig, request: Request) -> list[KvLookup]:
    """What was asked for a request, one lookup each time it was let in."""
    asks = [ask for outcome in rig.outcomes for ask in outcome.kv if isinstance(ask, KvLookup)]
    return [ask for ask in asks if ask.handle == request.handle]


def steps(rig: Rig, until: Callable[[], bool]) -> None:
    for _ in range(30):
        if until():
            return
        rig.step()
    pytest.fail("thirty steps were not enough")


@pytest.mark.parametrize("ready", ["before", "after"])
def test_a_fetch_makes_room_for_what_computes(ready: str) -> None:
    """Though it came first and has a higher priority: with its pages, and with its place."""
    rig = attached(num_pages=6, max_sequences=1)
    if ready == "before":
        rig.submit(STREAMS[1][:100], bypass_cache=True)
    fetch = rig.submit(STREAMS[0][:200], blocks_within_s=WITHIN_S, fetch_only=True, priority=3)
    if ready == "after":
        rig.step()
        (lookup,) = asked(rig, fetch)
        rig.scheduler.kv_found(KvFound(lookup.ticket, (), more=True))
        rig.submit(STREAMS[1][:100], bypass_cache=True)
    rig.step()
    assert [len(run.tokens) for run in rig.steps[-1].runs] == [96]
    if ready == "after":
        assert KvCancel(lookup.ticket) in rig.outcomes[-1].kv
    steps(rig, lambda: len(asked(rig, fetch)) > (ready == "after"))
    assert list(rig.ends.values()) == [FinishReason.LENGTH]
    assert fetch.handle not in {handle for handle, _ in rig.ends}


def test_a_fetch_gives_its_pages_to_what_decodes() -> None:
    rig = attached(num_pages=6)
    decode = rig.submit(STREAMS[1][:127], bypass_cache=True, sampling=Sampling(max_tokens=9, ignore_eos=True))
    rig.step()
    rig.submit(STREAMS[0][:250], blocks_within_s=WITHIN_S, fetch_only=True, priority=3)
    steps(rig, lambda: len(rig.output[decode.handle, 0]) == 9)
    assert not any(end.preemptions for outcome in rig.outcomes for end in outcome.ends if end.handle == decode.handle)


def test_the_time_for_a_fetch_runs_on_while_it_waits() -> None:
    rig = attached(num_pages=6, max_sequences=1)
    fetch = rig.submit(STREAMS[0][:200], blocks_within_s=WITHIN_S, fetch_only=True)
    rig.step()
    rig.submit(STREAMS[1][:100], bypass_cache=True)
    rig.step()
    rig.now += 1.5
    steps(rig, lambda: len(asked(rig, fetch)) == 2)
    first, second = asked(rig, fetch)
    assert first.coming_s == pytest.approx(WITHIN_S - 0.01)
    assert 0 < second.coming_s < 0.5
    assert second.hashes == first.hashes


@pytest.mark.parametrize(("prompt", "waited"), [(3 * PAGE - 1, 2), (3 * PAGE, 3), (PAGE - 1, 0)])
def test_a_block_that_ends_with_the_first_token_is_not_waited_for(prompt: int, waited: int) -> None:
    """The other engine samples that token and does not compute its K and V."""
    rig = attached()
    generated = array("I", STREAMS[0][prompt : prompt + 1])
    goes_on = rig.submit(STREAMS[0][:prompt], generated=generated, blocks_within_s=WITHIN_S)
    rig.step()
    (lookup,) = asked(rig, goes_on)
    assert (len(lookup.hashes) // 32, lookup.coming_s > 0) == (waited or 1, waited > 0)


def test_a_fetch_takes_all_full_blocks_of_its_prompt() -> None:
    rig = attached()
    fetch = rig.submit(STREAMS[0][: 3 * PAGE], blocks_within_s=WITHIN_S, fetch_only=True)
    rig.step()
    assert len(asked(rig, fetch)[0].hashes) == 3 * 32
