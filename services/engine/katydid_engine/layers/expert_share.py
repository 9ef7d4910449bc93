"""Which part of a layer's experts one rank holds: some columns of each, or whole ones, perhaps with copies of others'.

A whole expert lies in a *slot*. Slots are numbered over all ranks of the group, a rank's one after the other; with
copies there are more slots than experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from katydid_engine.collectives import Collectives, SingleRank

__all__ = ["ExpertShare"]

_ALONE = SingleRank()


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """One rank's share.

    Attributes:
        experts: the model's expert in each of this rank's slots.
        first: number of this rank's first slot, as routed ids name it.
        column_part, column_parts: which part of every expert's columns is held, of how many.
        group: the ranks that hold whole experts between them, which must agree on constant scales.
    """

    experts: tuple[int, ...]
    first: int = 0
    column_part: int = 0
    column_parts: int = 1
    group: Collectives = _ALONE

    @classmethod
    def of_columns(cls, num_experts: int, part: int, parts: int) -> ExpertShare:
        return cls(tuple(range(num_experts)), column_part=part, column_parts=parts)

    @classmethod
    def of_whole(cls, num_experts: int, group: Collectives, copies: int = 0) -> ExpertShare:
        """As before anything is known of the load: experts in order, then ``copies`` more of the first ones."""
        slots = [*range(num_experts), *(index % num_experts for index in range(copies))]
        each = len(slots) // group.size
        first = group.rank * each
        return cls(tuple(slots[first : first + each]), first, group=group)
