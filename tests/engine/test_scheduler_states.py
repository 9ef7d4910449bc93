"""The scheduler as a state machine: whatever happens in whatever order, every page read is right and none is lost."""

from __future__ import annotations

from array import array

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from katydid_engine.messages import KvArrived, KvCancel, KvCorrupt, KvFound, KvLookup, KvReadSlotsFree, KvStore
from katydid_engine.request import Sampling, Tier
from katydid_engine.sparse_prefill import SparsePrefill
from katydid_engine.token_budget import TokenBudget

from tests.engine.paper_runner import checksum
from tests.engine.scheduler_rig import STREAMS, Rig

LENGTHS = [129, 64, 192, 250, 65, 128, 63, 1, 150, 127, 2]
FLAGS = ["ignore_eos", "generated", "prompt_logprobs", "bypass", "deadline", "sparse"]
# The first two share a block and a half, the others nothing.
PROMPTS = [STREAMS[0], STREAMS[0][:96] + STREAMS[1][96:], STREAMS[1], STREAMS[1][::-1]]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of shared prefixes, aborts at any time, a cache service that comes, goes, and finds part of it."""

    @initialize(
        num_pages=st.sampled_from([5, 6, 9, 16]),
        batch=st.sampled_from([5, 70, 300]),
        watermark=st.integers(0, 1),
        attached=st.booleans(),
        drafts=st.integers(0, 3),
        ahead=st.booleans(),
        paces=st.sampled_from([None, (0.005, None), (None, 0.1), (0.005, 0.1)]),
        sizes=st.sampled_from([(), (16, 64)]),
    )
    def build(
        self,
        num_pages: int,
        batch: int,
        watermark: int,
        attached: bool,
        drafts: int,
        ahead: bool,
        paces: tuple[float | None, float | None] | None,
        sizes: tuple[int, ...],
    ) -> None:
        limits = {"max_batch_tokens": batch, "watermark_pages": watermark, "max_bypass": 2, "drafts": drafts}
        tpot_s, ttft_s = paces or (None, None)
        budget = None if paces is None else TokenBudget(tpot_s, 4, sizes, sizes)
        sparse = None if paces is None else SparsePrefill(min_tokens=100, tail_blocks=0)
        self.rig = Rig(
            num_pages=num_pages, slots=3, ahead=ahead, budget=budget, ttft_target_s=ttft_s, sparse=sparse, **limits
        )
        self.store: dict[bytes, list[int]] = {}
        self.lookups: list[KvLookup] = []
        self.fetches: dict[int, list[bytes]] = {}
        self.stores: list[KvStore] = []
        self.free_read_slots = [3, 4, 5]
        self.lent: set[int] = set()
        self.spoilt: set[bytes] = set()
        self.rig.scheduler.kv.set_attached(attached)

    def take_asks(self) -> None:
        for outcome in self.rig.outcomes:
            for ask in outcome.kv:
                if isinstance(ask, KvLookup):
                    self.lookups.append(ask)
                elif isinstance(ask, KvStore):
                    self.stores.append(ask)
                elif isinstance(ask, KvReadSlotsFree):
                    assert self.lent >= set(ask.slots), "a slot was given back twice"
                    self.lent -= set(ask.slots)
                    self.free_read_slots += ask.slots
                elif isinstance(ask, KvCorrupt):
                    assert ask.hash in self.spoilt, "a right block was reported"
                else:
                    assert isinstance(ask, KvCancel)
                    self.lookups = [lookup for lookup in self.lookups if lookup.ticket != ask.ticket]
                    self.fetches.pop(ask.ticket, None)
        self.rig.outcomes.clear()

    @rule(
        stream=st.integers(0, 3),
        length=st.sampled_from(LENGTHS),
        max_tokens=st.sampled_from([1, 2, 5, 70]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        flags=st.sets(st.sampled_from(FLAGS), max_size=2),
        seed=st.integers(0, 3),
        copies=st.integers(1, 3),
    )
    def submit(
        self, stream: int, length: int, max_tokens: int, n: int, priority: int, flags: set[str], seed: int, copies: int
    ) -> None:
        generated = array("I")
        if "generated" in flags and n == 1:
            generated = array("I", PROMPTS[stream][length : length + 30])
            max_tokens += 30
        sampling = Sampling(
            seed=seed, n=n, max_tokens=max_tokens, ignore_eos="ignore_eos" in flags, stop_token_ids=(9,),
            prompt_logprobs=0 if "prompt_logprobs" in flags else None,
        )  # fmt: skip
        for _ in range(copies):
            self.rig.submit(
                PROMPTS[stream][:length],
                sampling=sampling,
                generated=generated,
                priority=priority,
                bypass_cache="bypass" in flags,
                sparse_prefill="sparse" in flags,
                deadline=self.rig.now + 0.5 if "deadline" in flags else None,
            )

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
        self.take_asks()

    @rule(pick=st.integers(0, 30))
    def step_with_abort(self, pick: int) -> None:
        self.rig.step(lambda: self.abort(pick))
        self.take_asks()

    @rule(rounds=st.integers(1, 4))
    def serve(self, rounds: int) -> None:
        """The cache service does its work between steps."""
        for _ in range(rounds):
            while self.stores:
                self.store_block()
            while self.lookups:
                self.answer_lookup(1.0)
            while self.fetches and self.free_read_slots:
                self.arrive(2, False, 3)
            self.steps(1)

    @rule(pick=st.integers(0, 30))
    def abort(self, pick: int) -> None:
        if self.rig.requests:
            self.rig.scheduler.abort(1 + pick % len(self.rig.requests))

    @rule()
    def flush(self) -> None:
        self.rig.pool.flush()

    @rule(attached=st.booleans())
    def attach(self, attached: bool) -> None:
        self.rig.scheduler.kv.set_attached(attached)

    @precondition(lambda self: self.lookups)
    @rule(fraction=st.floats(0, 1))
    def answer_lookup(self, fraction: float) -> None:
        ask = self.lookups.pop(0)
        hashes = [ask.hashes[i : i + 32] for i in range(0, len(ask.hashes), 32)]
        found = next((i for i, h in enumerate(hashes) if h not in self.store), len(hashes))
        found = round(found * fraction)
        runs = [(Tier.MEMORY, found // 2), (Tier.DISK, found - found // 2)]
        self.rig.scheduler.kv_found(KvFound(ask.ticket, tuple(run for run in runs if run[1])))
        if found:
            self.fetches[ask.ticket] = hashes[:found]

    @precondition(lambda self: self.fetches)
    @rule(count=st.integers(0, 3), give_up=st.booleans(), spoil=st.integers(0, 9))
    def arrive(self, count: int, give_up: bool, spoil: int) -> None:
        """Block number `spoil` of those that arrive, if there is one, has other bytes than it should."""
        ticket = next(iter(self.fetches))
        left = self.fetches[ticket]
        count = min(count, len(left), len(self.free_read_slots))
        slots = [self.free_read_slots.pop() for _ in range(count)]
        checksums = []
        for place, (slot, block_hash) in enumerate(zip(slots, left, strict=False)):
            self.rig.runner.slots[slot] = self.store[block_hash][:]
            checksums.append(checksum(self.store[block_hash]))
            if place == spoil:
                self.rig.runner.slots[slot][7] ^= 1
                self.spoilt.add(block_hash)
        self.lent |= set(slots)
        del left[:count]
        last = give_up or not left
        if last:
            del self.fetches[ticket]
        self.rig.scheduler.kv_arrived(KvArrived(ticket, tuple(slots), last, tuple(checksums)))

    @precondition(lambda self: self.stores)
    @rule()
    def store_block(self) -> None:
        ask = self.stores.pop(0)
        self.store[ask.hash] = self.rig.runner.slots[ask.slot][:]
        self.rig.scheduler.kv.free_write_slots((ask.slot,))

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check_integrity()

    @invariant()
    def who_is_held_back_does_not_fit(self) -> None:
        if not hasattr(self, "rig"):
            return
        pool, queues = self.rig.pool, self.rig.scheduler._queues
        for sequence in queues.waiting:
            if pool.gains < sequence.fits_from:
                matched = pool.match(sequence.hashes()) if sequence.reads_cache else []
                in_use = len(matched) - pool.count_unreferenced(matched)
                assert pool.num_available + in_use < -(-sequence.num_tokens // 64)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(1000):
            self.serve(4)
            if self.rig.scheduler.num_requests == 0:
                break
        self.rig.run_out()
        self.take_asks()
        assert not self.lent, "a read slot was never given back"
        self.rig.check_outputs()


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase
