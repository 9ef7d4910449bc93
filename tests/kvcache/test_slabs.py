"""Slot bookkeeping against a plain model: which (slab, index) pairs are taken, by whom."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from katydid_kvcache.slabs import SlabAllocator, Slot

SLABS, SLAB_BYTES = 4, 64
SIZES = (8, 16, 24, 64)


class Slabs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots: SlabAllocator[str] = SlabAllocator(SLABS, SLAB_BYTES)
        self.taken: dict[Slot, tuple[int, str]] = {}
        self.given_back: list[Slot] = []
        self.withdrawn: list[tuple[int, range]] = []
        self.count = 0

    @rule(size=st.sampled_from(SIZES))
    def allocate(self, size: int) -> None:
        self.count += 1
        promised = self.slots.has_room(size)
        slot = self.slots.allocate(size, f"owner {self.count}")
        assert promised == (slot is not None)
        used = {other.slab for other in self.taken} | {number for number, _ in self.slots}
        room = len(used) < SLABS or any(slab.free for _, slab in self.slots if slab.slot_bytes == size)
        if slot is None:
            assert not room
            return
        start = slot.index * size
        for other, (other_size, _) in self.taken.items():
            overlap = start < (other.index + 1) * other_size and other.index * other_size < start + size
            assert other.slab != slot.slab or not overlap
        bad = [where for slab, where in self.withdrawn if slab == slot.slab]
        assert not any(start < where.stop and where.start < start + size for where in bad), "wrong bytes lie there"
        assert self.slots.offset(slot) == start
        assert start + size <= SLAB_BYTES
        assert all(slot.generation > other.generation for other in [*self.taken, *self.given_back])
        self.taken[slot] = size, f"owner {self.count}"

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), withdraw=st.booleans())
    def give_back(self, data: st.DataObject, withdraw: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken, key=lambda slot: slot.generation)))
        # Withdrawing is rare in life; here it would use the slots up.
        if withdraw and self.slots.withdrawn < 2:
            start = self.slots.offset(slot)
            self.withdrawn.append((slot.slab, range(start, start + self.taken[slot][0])))
            self.slots.withdraw(slot)
        else:
            self.slots.free(slot)
        del self.taken[slot]
        self.given_back.append(slot)

    @precondition(lambda self: self.given_back)
    @rule(data=st.data())
    def stale_slot_is_refused(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.given_back))
        assert not self.slots.holds(slot)
        with pytest.raises(KeyError):
            self.slots.free(slot)

    @rule()
    def growth_stops_and_resumes(self) -> None:
        self.slots.stop_growing()
        assert self.slots.capacity_bytes == SLAB_BYTES * len(list(self.slots))
        self.slots.check_integrity()
        self.slots.resume_growing()
        assert self.slots.capacity_bytes == SLAB_BYTES * SLABS

    @invariant()
    def books_balance(self) -> None:
        self.slots.check_integrity()
        assert all(self.slots.holds(slot) for slot in self.taken)
        owners = {owner for number, _ in self.slots for owner in self.slots.owners(number)}
        assert owners == {owner for _, owner in self.taken.values()}


TestSlabs = Slabs.TestCase
TestSlabs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_slot_larger_than_a_slab_is_never_given() -> None:
    slots: SlabAllocator[str] = SlabAllocator(2, 64)
    assert [slots.has_room(size) for size in (64, 65)] == [True, False]
    assert slots.allocate(65, "big") is None


def test_no_new_slab_while_growth_is_stopped() -> None:
    slots: SlabAllocator[str] = SlabAllocator(2, 64)
    first = slots.allocate(64, "a")
    slots.stop_growing()
    assert slots.allocate(64, "b") is None
    assert first is not None
    slots.free(first)
    assert slots.allocate(64, "b") is not None


def test_restored_slots_are_taken_and_the_rest_is_free() -> None:
    slots: SlabAllocator[str] = SlabAllocator(2, 64, first_generation=100)
    slots.restore(1, 16, {0: (7, "a"), 2: (9, "b")})
    slots.check_integrity()
    assert slots.holds(Slot(1, 2, 9))
    assert not slots.holds(Slot(1, 2, 8))
    given = [slots.allocate(16, "new") for _ in range(2)]
    assert {(slot.slab, slot.index) for slot in given if slot} == {(1, 1), (1, 3)}
    assert all(slot.generation >= 100 for slot in given if slot)
