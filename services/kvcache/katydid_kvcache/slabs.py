"""Deals out fixed-size slots from slabs: the bookkeeping of the memory arena and of the disk's segment files alike.

A tier is cut into slabs of one size. A slab serves one slot size from the moment its first slot is taken until its last
one is given back; then any slot size may have it. Every taken slot gets a generation that is never used again, so a
stale reference to a slot can be told from a current one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Slab", "SlabAllocator", "Slot"]

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Slot:
    """Slot `index` of slab `slab`, as taken in `generation`."""

    slab: int
    index: int
    generation: int


class Slab(Generic[Owner]):
    """One slab in use: its slot size, and who owns which slot."""

    __slots__ = ("free", "owners", "slot_bytes", "slots", "withdrawn")

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.free = list(range(slots - 1, -1, -1))
        self.owners: dict[int, tuple[int, Owner]] = {}
        self.withdrawn: set[int] = set()


class SlabAllocator(Generic[Owner]):
    """`slabs` slabs of `slab_bytes` bytes; generations count from `first_generation`."""

    def __init__(self, slabs: int, slab_bytes: int, *, first_generation: int = 1) -> None:
        self.slab_bytes = slab_bytes
        self.total_slabs = slabs
        self._generation = first_generation
        self._unused = list(range(slabs - 1, -1, -1))
        self._forgone: list[int] = []
        self._slabs: dict[int, Slab[Owner]] = {}
        # Slabs by slot size: every write to a full tier asks, and there may be thousands of slabs.
        self._counts: Counter[int] = Counter()
        # Slabs of a slot size that have a free slot; a dict as an ordered set, so that filling is deterministic.
        self._open: dict[int, dict[int, None]] = {}

    def allocate(self, slot_bytes: int, owner: Owner) -> Slot | None:
        """A free slot of `slot_bytes` bytes for `owner`, or None when all are taken or no slot fits a slab."""
        open_slabs = self._open.setdefault(slot_bytes, {})
        if not open_slabs:
            if not self._unused or slot_bytes > self.slab_bytes:
                return None
            number = self._unused.pop()
            self._slabs[number] = Slab(slot_bytes, self.slab_bytes // slot_bytes)
            self._counts[slot_bytes] += 1
            open_slabs[number] = None
        number = next(iter(open_slabs))
        slab = self._slabs[number]
        index = slab.free.pop()
        if not slab.free:
            del open_slabs[number]
        slot = Slot(number, index, self._generation)
        self._generation += 1
        slab.owners[index] = (slot.generation, owner)
        return slot

    def has_room(self, slot_bytes: int) -> bool:
        """Whether `allocate` would find a free slot."""
        return bool(self._open.get(slot_bytes) or (self._unused and slot_bytes <= self.slab_bytes))

    def position(self, slot: Slot) -> int:
        """Where a slot begins, counted from the beginning of the first slab."""
        return slot.slab * self.slab_bytes + self.offset(slot)

    def free(self, slot: Slot) -> None:
        """Give a slot back. Raises KeyError for a slot that is not taken in that generation."""
        slab = self._take_out(slot)
        slab.free.append(slot.index)
        if not slab.owners and not slab.withdrawn:
            self._open[slab.slot_bytes].pop(slot.slab, None)
            del self._slabs[slot.slab]
            self._counts[slab.slot_bytes] -= 1
            self._unused.append(slot.slab)
        else:
            self._open[slab.slot_bytes][slot.slab] = None

    def withdraw(self, slot: Slot) -> None:
        """Take a slot out of use for good, because its storage gave wrong bytes."""
        self._take_out(slot).withdrawn.add(slot.index)

    def restore(self, number: int, slot_bytes: int, owners: Mapping[int, tuple[int, Owner]]) -> None:
        """Mark slots of an unused slab as taken, after a restart: `owners` gives generation and owner by index."""
        self._unused.remove(number)
        slab: Slab[Owner] = Slab(slot_bytes, self.slab_bytes // slot_bytes)
        slab.owners.update(owners)
        slab.free = [index for index in slab.free if index not in owners]
        self._slabs[number] = slab
        self._counts[slot_bytes] += 1
        open_slabs = self._open.setdefault(slot_bytes, {})
        if slab.free:
            open_slabs[number] = None

    def stop_growing(self) -> int:
        """Do without the slabs that are not in use, because there turned out to be no storage behind them; how many."""
        forgone, self._unused = self._unused, []
        self._forgone += forgone
        return len(forgone)

    def resume_growing(self) -> None:
        """Undo `stop_growing`: there may be storage again."""
        self._unused += self._forgone
        self._forgone = []

    def offset(self, slot: Slot) -> int:
        """Byte offset of the slot within its slab."""
        return slot.index * self._slabs[slot.slab].slot_bytes

    def holds(self, slot: Slot) -> bool:
        """Whether the slot is still taken in its generation."""
        slab = self._slabs.get(slot.slab)
        entry = slab.owners.get(slot.index) if slab else None
        return entry is not None and entry[0] == slot.generation

    def owners(self, number: int) -> list[Owner]:
        """Owners of all taken slots of a slab."""
        return [owner for _, owner in self._slabs[number].owners.values()]

    def slabs_of(self, slot_bytes: int) -> int:
        """How many slabs serve a slot size now."""
        return self._counts[slot_bytes]

    def slot_sizes(self) -> set[int]:
        """Slot sizes that have slabs now."""
        return {slot_bytes for slot_bytes, slabs in self._counts.items() if slabs}

    def whole(self, number: int) -> bool:
        """Whether emptying the slab would set it free: no slot of it is withdrawn."""
        return not self._slabs[number].withdrawn

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slabs that can be had."""
        return (self.total_slabs - len(self._forgone)) * self.slab_bytes

    @property
    def withdrawn(self) -> int:
        """Slots taken out of use."""
        return sum(len(slab.withdrawn) for slab in self._slabs.values())

    def __iter__(self) -> Iterator[tuple[int, Slab[Owner]]]:
        return iter(self._slabs.items())

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        assert sorted([*self._unused, *self._forgone, *self._slabs]) == list(range(self.total_slabs)), (
            "a slab is lost or doubled"
        )
        assert +self._counts == Counter(slab.slot_bytes for slab in self._slabs.values()), "slabs are miscounted"
        generations = set()
        for number, slab in self._slabs.items():
            taken = [*slab.free, *slab.owners, *slab.withdrawn]
            assert sorted(taken) == list(range(slab.slots)), f"slab {number} lost or doubled a slot"
            assert slab.owners or slab.withdrawn, f"slab {number} is empty and not given back"
            assert (number in self._open[slab.slot_bytes]) == bool(slab.free), f"slab {number} hides free slots"
            generations |= {generation for generation, _ in slab.owners.values()}
        assert len(generations) == sum(len(slab.owners) for slab in self._slabs.values()), "a generation is used twice"
        assert all(number in self._slabs for numbers in self._open.values() for number in numbers)

    def _take_out(self, slot: Slot) -> Slab[Owner]:
        if not self.holds(slot):
            raise KeyError(f"slot {slot} is not taken")
        slab = self._slabs[slot.slab]
        del slab.owners[slot.index]
        return slab
