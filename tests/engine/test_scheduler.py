"""What the scheduler promises, case by case; most are failures that other engines have had."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
from katydid_engine.messages import KvArrived, KvCancel, KvFound, KvLookup, KvReadSlotsFree, KvStore
from katydid_engine.request import FinishReason, Phase, Sampling, Tier, fetch_span_id
from katydid_engine.scheduler import SchedulerConfig
from katydid_runtime.block_hash import ChainKey

from tests.engine.paper_runner import PAGE, digests
from tests.engine.scheduler_rig import STREAMS, Rig


def test_a_prompt_cached_entirely_computes_its_last_token_without_writing() -> None:
    rig = Rig()
    rig.submit(STREAMS[0][:128])
    rig.run_out()
    rig.steps.clear()
    rig.submit(STREAMS[0][:128])
    rig.step()
    (run,) = rig.steps[0].runs
    assert (run.start, len(run.tokens), run.writes) == (127, 1, False)
    rig.run_out()
    rig.check_outputs()
    assert rig.outcomes[-1] is not None


@pytest.mark.parametrize("offset", range(0, 64, 7))
def test_preemption_at_any_offset_in_a_block(offset: int) -> None:
    """Two sequences outgrow a pool that holds one and a half: the later one is recomputed, both end right."""
    rig = Rig(num_pages=6, max_batch_tokens=300)
    sampling = Sampling(seed=1, max_tokens=150, ignore_eos=True)
    for stream in STREAMS:
        rig.submit(stream[: 100 + offset], sampling=sampling)
    rig.run_out()
    rig.check_outputs()
    assert sum(end.preemptions for outcome in rig.outcomes for end in outcome.ends) > 0


def test_pages_that_steps_in_flight_hold_are_waited_for() -> None:
    """With frees deferred behind steps in flight, nobody else is preempted for pages that are coming already."""

    def preemptions(ahead: bool) -> int:
        rig = Rig(num_pages=9, max_batch_tokens=300, ahead=ahead, drafts=2)
        for index in range(4):
            rig.submit(STREAMS[index % 2][index : 100 + index], sampling=Sampling(max_tokens=80, ignore_eos=True))
        rig.run_out()
        rig.check_outputs()
        return sum(end.preemptions for outcome in rig.outcomes for end in outcome.ends)

    assert 0 < preemptions(True) <= preemptions(False) + 1


def test_admission_waits_for_the_whole_input() -> None:
    """A second prompt that does not fit beside the first waits; nothing is ever preempted for a prefill."""
    rig = Rig(num_pages=8, max_batch_tokens=32)
    for stream in STREAMS:
        rig.submit(stream[:290], sampling=Sampling(max_tokens=2, ignore_eos=True))
    rig.run_out()
    rig.check_outputs()
    assert all(end.preemptions == 0 for outcome in rig.outcomes for end in outcome.ends)
    assert all(len(plan.runs) == 1 for plan in rig.steps)


def test_an_engine_that_has_given_no_page_back_yet_admits_beside_a_watermark() -> None:
    rig = Rig(num_pages=12, watermark_pages=3)
    for stream in STREAMS:
        rig.submit(stream[:100], sampling=Sampling(max_tokens=9, ignore_eos=True))
    rig.step()
    assert rig.scheduler.load().running == 2
    rig.run_out()
    rig.check_outputs()


def test_a_hungry_request_blocks_nobody_and_is_not_starved() -> None:
    rig = Rig(num_pages=8, max_bypass=3)
    rig.submit(STREAMS[0][:200], sampling=Sampling(max_tokens=60, ignore_eos=True))
    rig.step()
    hungry = rig.submit(STREAMS[1][:290])
    for i in range(6):
        rig.submit([i] * 20, sampling=Sampling(max_tokens=1))
    rig.run_out()
    started = [start.sequence for plan in rig.steps for start in plan.starts]
    assert started == [1, 3, 4, 5, 2, 6, 7, 8], "three passed it, then it was next"
    assert len(rig.output[hungry.handle, 0]) == 4
    rig.check_outputs()


def test_a_long_prompt_starves_neither_decodes_nor_a_newcomer() -> None:
    rig = Rig(num_pages=64, max_model_tokens=2000, max_batch_tokens=64)
    old = rig.submit([1] * 10, sampling=Sampling(max_tokens=60, ignore_eos=True))
    rig.step()
    long = rig.submit([i % 50 for i in range(1500)], sampling=Sampling(max_tokens=1))
    rig.step()
    before = len(rig.output[old.handle, 0])
    for _ in range(5):
        rig.step()
    assert len(rig.output[old.handle, 0]) == before + 5, "a token every step"
    short = rig.submit([2] * 30, sampling=Sampling(max_tokens=1))
    steps = 0
    while (short.handle, 0) not in rig.ends:
        rig.step()
        steps += 1
    assert steps <= 2
    assert (long.handle, 0) not in rig.ends
    rig.run_out()
    rig.check_outputs()


def test_priority_takes_the_place_of_lower_priority() -> None:
    rig = Rig(num_pages=8, max_batch_tokens=600)
    low = rig.submit(STREAMS[0][:290], sampling=Sampling(max_tokens=10, ignore_eos=True))
    rig.step()
    high = rig.submit(STREAMS[1][:290], priority=1, sampling=Sampling(max_tokens=2, ignore_eos=True))
    rig.run_out()
    assert list(rig.ends) == [(high.handle, 0), (low.handle, 0)]
    rig.check_outputs()


def test_prompt_logprobs_come_once_whatever_happens() -> None:
    rig = Rig(num_pages=8, max_batch_tokens=40)
    prompt = STREAMS[0][:200]
    request = rig.submit(prompt, sampling=Sampling(max_tokens=2, prompt_logprobs=0))
    rig.step()
    rig.step()
    rig.submit(STREAMS[1][:290], priority=1, sampling=Sampling(max_tokens=2))
    rig.run_out()
    assert rig.prompt_targets[request.handle] == [float(token) for token in prompt[1:]]
    rig.check_outputs()


def test_deadline_ends_a_request_in_any_state() -> None:
    rig = Rig()
    late = rig.submit(STREAMS[0][:100], deadline=0.005)
    running = rig.submit(STREAMS[0][:100], deadline=0.035, sampling=Sampling(max_tokens=100, ignore_eos=True))
    assert rig.scheduler.next_wake() == 0.005
    rig.run_out()
    errors = {end.handle: end.error for outcome in rig.outcomes for end in outcome.ends}
    assert errors == {late.handle: "DEADLINE_EXCEEDED", running.handle: "DEADLINE_EXCEEDED"}
    assert not rig.output[late.handle, 0]
    assert rig.output[running.handle, 0]
    rig.check_outputs()


def test_an_idle_scheduler_still_writes_blocks_back() -> None:
    rig = Rig(slots=1)
    rig.scheduler.kv.set_attached(True)
    rig.submit(STREAMS[0][:192], sampling=Sampling(max_tokens=1))
    rig.step()
    (lookup,) = [ask for outcome in rig.outcomes for ask in outcome.kv]
    rig.scheduler.kv_found(KvFound(lookup.ticket, ()))
    stored = []
    for _ in range(10):
        rig.step()
        for ask in rig.outcomes[-1].kv:
            assert isinstance(ask, KvStore)
            stored.append(ask.hash)
            rig.scheduler.kv.free_write_slots((ask.slot,))
    assert stored == [lookup.hashes[i : i + 32] for i in range(0, 96, 32)]


@pytest.mark.parametrize("answered", [False, True])
def test_abort_while_blocks_are_on_their_way(answered: bool) -> None:
    rig = Rig(slots=2)
    rig.scheduler.kv.set_attached(True)
    request = rig.submit(STREAMS[0][:192])
    rig.step()
    lookup = rig.outcomes[-1].kv[0]
    if answered:
        rig.scheduler.kv_found(KvFound(lookup.ticket, ((Tier.MEMORY, 3),)))
        rig.scheduler.kv_arrived(KvArrived(lookup.ticket, (2,), False))
    rig.scheduler.abort(request.handle)
    asks = rig.collect().kv
    assert KvCancel(lookup.ticket) in asks
    assert [ask.slots for ask in asks if isinstance(ask, KvReadSlotsFree)] == ([(2,)] if answered else [])
    rig.scheduler.kv_arrived(KvArrived(lookup.ticket, (3,), True))
    assert rig.collect().kv == (KvReadSlotsFree((3,)),)
    rig.check_outputs()


def test_phases_follow_each_other_without_a_gap() -> None:
    rig = Rig(slots=2)
    rig.scheduler.kv.set_attached(True)
    rig.submit(STREAMS[0][:192])
    rig.step()
    lookup = rig.outcomes[-1].kv[0]
    rig.now += 0.5
    rig.scheduler.kv_found(KvFound(lookup.ticket, ((Tier.MEMORY, 1), (Tier.DISK, 1))))
    for slot, last in ((2, False), (3, True)):
        block = slot - 2
        rig.runner.slots[slot] = digests(STREAMS[0])[PAGE * block : PAGE * (block + 1)]
        rig.scheduler.kv_arrived(KvArrived(lookup.ticket, (slot,), last))
        rig.step()
    rig.run_out()
    (first,) = [first for outcome in rig.outcomes for first in outcome.first_tokens]
    (end,) = [end for outcome in rig.outcomes for end in outcome.ends]
    intervals = (*first.intervals, *end.intervals)
    assert [(interval.phase, interval.tier) for interval in intervals] == [
        (Phase.QUEUE, None),
        (Phase.LOOKUP, None),
        (Phase.FETCH, Tier.MEMORY),
        (Phase.FETCH, Tier.DISK),
        (Phase.PREFILL, None),
        (Phase.DECODE, None),
    ]
    assert intervals[0].start == 0.0
    assert all(before.end == after.start for before, after in pairwise(intervals))
    assert (first.cached.memory, first.cached.disk) == (64, 64)
    ids = [interval.span_id for interval in intervals]
    assert ids == [b"", lookup.span_id, *(fetch_span_id(lookup.span_id, block) for block in (0, 1)), b"", b""]
    assert len(set(ids[1:4])) == 3
    rig.check_outputs()


def test_a_token_counts_from_when_the_device_was_done_with_its_step() -> None:
    """Not from when the host came to see it; a phase ends where it began at the earliest."""

    def borders(late_s: float) -> list[float]:
        rig = Rig()
        run = rig.runner.run
        rig.runner.run = lambda plan: replace(run(plan), late_s=late_s)  # type: ignore[method-assign]
        rig.submit(STREAMS[0][:70], sampling=Sampling(max_tokens=3, ignore_eos=True))
        rig.run_out()
        (first,) = [first for outcome in rig.outcomes for first in outcome.first_tokens]
        (end,) = [end for outcome in rig.outcomes for end in outcome.ends]
        return [interval.end for interval in (*first.intervals, *end.intervals)]

    queued, prefilled, decoded = borders(0.0)
    assert borders(0.004) == pytest.approx([queued, max(queued, prefilled - 0.004), decoded - 0.004])
    assert borders(60.0) == [queued] * 3


def test_pages_of_an_aborted_request_stay_taken_while_its_step_runs() -> None:
    rig = Rig()
    request = rig.submit(STREAMS[0][:100])
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.scheduler.abort(request.handle)
    assert rig.pool.num_available == rig.pool.num_pages - 2, "the step in flight still writes to them"
    rig.scheduler.check_integrity()
    rig.scheduler.commit(plan, rig.runner.run(plan))
    assert rig.pool.num_available == rig.pool.num_pages
    rig.collect()
    rig.check_outputs()


def test_a_page_that_changed_hands_is_not_written_back() -> None:
    """The one write slot is busy while the queued blocks' pages are evicted and filled by another prompt."""
    rig = Rig(num_pages=5, slots=1, max_batch_tokens=300)
    rig.scheduler.kv.set_attached(True)

    def serve(prompt: list[int]) -> list[KvStore]:
        rig.submit(prompt, sampling=Sampling(max_tokens=1))
        stores = []
        for _ in range(6):
            rig.step()
            for ask in rig.outcomes[-1].kv:
                if isinstance(ask, KvLookup):
                    rig.scheduler.kv_found(KvFound(ask.ticket, ()))
                elif isinstance(ask, KvStore):
                    stores.append(ask)
        return stores

    (first,) = serve(STREAMS[0][:256])
    assert serve(STREAMS[1][:256]) == []
    rig.scheduler.kv.free_write_slots((first.slot,))
    stored = []
    while rig.step():
        for ask in rig.outcomes[-1].kv:
            assert isinstance(ask, KvStore)
            stored.append((ask.hash, rig.runner.slots[ask.slot]))
            rig.scheduler.kv.free_write_slots((ask.slot,))
    chain = ChainKey(b"m" * 32, salt=b"s", public_blocks=1).extend(array("I", STREAMS[1][:256]))
    content = digests(STREAMS[1])
    assert stored == [(chain[32 * i : 32 * i + 32], content[PAGE * i : PAGE * (i + 1)]) for i in range(4)]


def test_a_sequence_of_no_numbers_ends_alone_and_poisons_nobody() -> None:
    rig = Rig(max_batch_tokens=300)
    broken = rig.submit(STREAMS[0][:130], sampling=Sampling(max_tokens=20, ignore_eos=True))
    sound = rig.submit(STREAMS[1][:130], sampling=Sampling(max_tokens=20, ignore_eos=True))
    rig.step()
    assert rig.pool.num_cached == 4
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.scheduler.commit(plan, replace(rig.runner.run(plan), broken=frozenset({0})))
    (end,) = rig.collect().ends
    assert (end.handle, end.error) == (broken.handle, "INTERNAL")
    assert rig.pool.num_cached == 2
    rig.run_out()
    assert rig.ends[sound.handle, 0] is FinishReason.LENGTH
    rig.submit(STREAMS[0][:130])
    rig.run_out()
    assert rig.outcomes[-2].ends[0].cached.device == 0
    rig.check_outputs()


def test_load_counts_only_what_is_to_be_computed() -> None:
    rig = Rig(slots=2, max_sequences=1)
    rig.submit(STREAMS[0][:200], sampling=Sampling(max_tokens=1))
    assert rig.scheduler.load().waiting_uncached_tokens == 200
    rig.run_out()
    rig.submit(STREAMS[1][:100], sampling=Sampling(max_tokens=9, ignore_eos=True))
    rig.submit(STREAMS[0][:200])
    assert rig.scheduler.load().waiting_uncached_tokens == 100 + 8, "192 of the second are cached"
    rig.run_out()
    rig.pool.flush()
    rig.scheduler.kv.set_attached(True)
    rig.submit(STREAMS[0][:200])
    rig.step()
    lookup = rig.outcomes[-1].kv[0]
    assert isinstance(lookup, KvLookup)
    assert rig.scheduler.load().waiting_uncached_tokens == 200
    rig.scheduler.kv_found(KvFound(lookup.ticket, ((Tier.MEMORY, 2),)))
    assert rig.scheduler.load().waiting_uncached_tokens == 72
    rig.scheduler.kv_arrived(KvArrived(lookup.ticket, (), True))
    rig.step()
    assert rig.scheduler.load().waiting_uncached_tokens == 200 - 96, "nothing came after all; a step has computed"
    rig.run_out()


def test_limits_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens=3"):
        SchedulerConfig(max_model_tokens=10, max_batch_tokens=3, max_sequences=4)
    with pytest.raises(ValueError, match="2 pages hold 128"):
        Rig(num_pages=2)


def unpack(rig: Rig, lookup: KvLookup, block: int, slot: int, *, last: bool) -> None:
    rig.runner.slots[slot] = digests(STREAMS[0])[PAGE * block : PAGE * (block + 1)]
    rig.scheduler.kv_arrived(KvArrived(lookup.ticket, (slot,), last))
    rig.step()


def test_blocks_that_another_engine_computes_come_while_others_decode() -> None:
    """The prompt's blocks are unpacked one by one, and nothing of it is computed before the last has come."""
    rig = Rig(slots=2)
    rig.scheduler.kv.set_attached(True)
    beside = rig.submit(STREAMS[1][:50], sampling=Sampling(max_tokens=30, ignore_eos=True), bypass_cache=True)
    rig.step()
    waits = rig.submit(STREAMS[0][:200], blocks_within_s=2.0)
    rig.step()
    (lookup,) = [ask for outcome in rig.outcomes for ask in outcome.kv if isinstance(ask, KvLookup)]
    assert lookup.coming_s == pytest.approx(2.0 - (rig.now - waits.received_at))
    rig.scheduler.kv_found(KvFound(lookup.ticket, (), more=True))
    for block in range(3):
        before = len(rig.output[beside.handle, 0])
        for _ in range(3):
            rig.step()
        assert len(rig.output[beside.handle, 0]) == before + 3, "others go on"
        assert not rig.output[waits.handle, 0]
        rig.scheduler.kv_found(KvFound(lookup.ticket, ((Tier.MEMORY, 1),), more=block < 2))
        unpack(rig, lookup, block, 2 + block % 2, last=block == 2)
    rig.run_out()
    runs = [run for plan in rig.steps for run in plan.runs[plan.num_decodes :]]
    assert [len(run.tokens) for run in runs] == [50, 200 - 192], "the tail alone is computed here"
    rig.check_outputs()


@pytest.mark.parametrize("found", [0, 2, 3])
def test_a_fetch_computes_nothing_and_leaves_its_blocks_to_the_next(found: int) -> None:
    rig = Rig(slots=2)
    rig.scheduler.kv.set_attached(True)
    rig.submit(STREAMS[0][:200], blocks_within_s=2.0, fetch_only=True)
    assert rig.scheduler.load().waiting_uncached_tokens == 0
    rig.step()
    lookup = rig.outcomes[-1].kv[0]
    assert isinstance(lookup, KvLookup)
    rig.scheduler.kv_found(KvFound(lookup.ticket, (), more=True))
    for block in range(found):
        rig.scheduler.kv_found(KvFound(lookup.ticket, ((Tier.MEMORY, 1),), more=True))
        unpack(rig, lookup, block, 2 + block % 2, last=False)
    assert rig.scheduler.load().waiting_uncached_tokens == 0
    rig.scheduler.kv_arrived(KvArrived(lookup.ticket, (), True))
    rig.step()
    (end,) = rig.outcomes[-1].ends
    assert (end.reason, end.output_tokens, end.cached.memory) == (FinishReason.LENGTH, 0, 64 * found)
    assert not any(plan.runs for plan in rig.steps)
    rig.requests.clear()
    rig.ends.clear()
    rig.scheduler.kv.set_attached(False)
    rig.submit(STREAMS[0][:200])
    rig.run_out()
    assert rig.outcomes[-2].ends[0].cached.device == 64 * found
    rig.check_outputs()


def test_a_fetch_without_a_cache_service_ends_at_once() -> None:
    rig = Rig()
    request = rig.submit(STREAMS[0][:200], blocks_within_s=2.0, fetch_only=True)
    rig.step()
    assert rig.ends[request.handle, 0] is FinishReason.LENGTH
    assert rig.pool.num_available == rig.pool.num_pages
