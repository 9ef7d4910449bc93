"""Very many requests in disorder, with drafts and steps planned ahead: every token right, no page lost, none given back
while a step in flight may use it."""

from __future__ import annotations

import random
from array import array

import pytest
from katydid_engine.messages import KvArrived, KvFound, KvLookup, KvReadSlotsFree, KvStore
from katydid_engine.request import Request, Sampling, Tier

from tests.engine.paper_runner import PAGE, checksum
from tests.engine.scheduler_rig import STREAMS, Rig

LENGTHS = [1, 2, 40, 63, 64, 65, 96, 127, 128, 129, 150]


class Disorder:
    """Submits, aborts, flushes, and a cache service that answers when it likes and loses a block now and then."""

    def __init__(self, seed: int) -> None:
        self.chooser = chooser = random.Random(seed)
        self.rig = Rig(
            num_pages=chooser.choice([6, 9, 20]),
            slots=4,
            ahead=chooser.random() < 0.8,
            drafts=chooser.randrange(4),
            max_batch_tokens=chooser.choice([12, 70, 300]),
            watermark_pages=chooser.randrange(2),
            max_bypass=3,
            lingers=(lambda: chooser.random() < 0.6) if chooser.random() < 0.7 else lambda: False,
        )
        self.rig.scheduler.kv.set_attached(chooser.random() < 0.7)
        self.store: dict[bytes, list[int]] = {}
        self.fetches: dict[int, list[bytes]] = {}
        self.free_read_slots = [4, 5, 6, 7]

    def submit(self) -> None:
        chooser = self.chooser
        stream, length = chooser.choice(STREAMS), chooser.choice(LENGTHS)
        n = chooser.choice([1, 1, 1, 1, 2, 3])
        resumed = n == 1 and chooser.random() < 0.15
        sampling = Sampling(
            seed=chooser.randrange(5),
            n=n,
            max_tokens=chooser.choice([1, 2, 5, 20, 70]) + 20 * resumed,
            ignore_eos=chooser.random() < 0.3,
            stop_token_ids=(9,),
            min_tokens=chooser.choice([0, 0, 4]) if chooser.random() < 0.1 else 0,
            prompt_logprobs=0 if chooser.random() < 0.05 else None,
        )
        self.rig.submit(
            stream[:length],
            sampling=sampling,
            generated=array("I", stream[length : length + 20] if resumed else ()),
            priority=chooser.choice([0, 0, 0, 1]),
            bypass_cache=chooser.random() < 0.05,
            deadline=self.rig.now + 0.3 if chooser.random() < 0.05 else None,
        )

    def step(self) -> None:
        self.rig.step(lambda: self.chooser.random() < 0.05 and self.abort())
        for flight in self.rig.scheduler._flights:
            held = [page for sequence in flight.sequences for page in sequence.pages]
            moved = [move.page for move in (*flight.plan.packs, *flight.plan.unpacks)]
            for page in (*held, *(run_page for run in flight.plan.runs for run_page in run.pages), *moved):
                assert self.rig.pool._references[page], f"page {page} was given back in flight"
        for outcome in self.rig.outcomes:
            for ask in outcome.kv:
                self.answer(ask)
        self.rig.outcomes.clear()
        for ticket in list(self.fetches):
            if self.chooser.random() < 0.5:
                self.arrive(ticket)

    def abort(self) -> None:
        live = list(self.rig.scheduler._ledger.requests)
        if live:
            self.rig.scheduler.abort(self.chooser.choice(live))

    def answer(self, ask: object) -> None:
        match ask:
            case KvLookup(ticket, _, wanted):
                hashes = [wanted[i : i + 32] for i in range(0, len(wanted), 32)]
                found = next((i for i, h in enumerate(hashes) if h not in self.store), len(hashes))
                found = found if self.chooser.random() < 0.8 else 0
                self.rig.scheduler.kv_found(KvFound(ticket, ((Tier.MEMORY, found),) if found else ()))
                if found:
                    self.fetches[ticket] = hashes[:found]
            case KvStore():
                if self.chooser.random() < 0.7:
                    self.store[ask.hash] = self.rig.runner.slots[ask.slot][:]
                self.rig.scheduler.kv.free_write_slots((ask.slot,))
            case KvReadSlotsFree(slots):
                self.free_read_slots += slots
            case _:
                self.fetches.pop(getattr(ask, "ticket", 0), None)

    def arrive(self, ticket: int) -> None:
        left = self.fetches[ticket]
        count = min(len(left), len(self.free_read_slots), self.chooser.randrange(3))
        slots = [self.free_read_slots.pop() for _ in range(count)]
        checked, checksums = self.chooser.random() < 0.5, []
        for slot, block_hash in zip(slots, left, strict=False):
            self.rig.runner.slots[slot] = self.store[block_hash][:]
            checksums.append(checksum(self.store[block_hash]) * checked)
            self.rig.runner.bad.discard(slot)
            if checked and self.chooser.random() < 0.1:
                self.rig.runner.slots[slot][self.chooser.randrange(PAGE)] ^= 1
                self.rig.runner.bad.add(slot)
        del left[:count]
        last = not left or self.chooser.random() < 0.05
        if last:
            del self.fetches[ticket]
        self.rig.scheduler.kv_arrived(KvArrived(ticket, tuple(slots), last, tuple(checksums)))

    def run(self, requests: int) -> list[Request]:
        for _ in range(requests):
            self.submit()
            for _ in range(self.chooser.randrange(4)):
                self.step()
            while self.rig.scheduler.num_requests > 8:
                self.step()
            if self.chooser.random() < 0.02:
                self.rig.pool.flush()
        for _ in range(20_000):
            moving = self.rig.in_flight or self.rig.scheduler._queues.moves
            if not self.rig.scheduler.num_requests and not moving:
                break
            self.step()
        self.rig.run_out()
        self.rig.check_outputs()
        assert sorted(self.free_read_slots) == [4, 5, 6, 7]
        return list(self.rig.requests.values())


@pytest.mark.parametrize("seed", range(6))
def test_disorder(seed: int) -> None:
    Disorder(seed).run(120)


def test_choices_that_are_resumed_in_one_block() -> None:
    """Found by the soak: two choices, preempted with equal tokens, whose newest token fills a block that both have."""
    Disorder(1126).run(200)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_disorder_of_a_hundred_thousand_requests() -> None:
    for seed in range(500):
        Disorder(1000 + seed).run(200)
