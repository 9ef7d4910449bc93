"""From one placement of experts to another: which slots change, and from where each gets its new expert. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Move", "keep_in_place", "moves_between"]


@dataclass(frozen=True, slots=True)
class Move:
    """Slot ``target`` gets what lies in slot ``source``; slots are numbered over all ranks."""

    target: int
    source: int


def keep_in_place(held: Sequence[int], wanted: Sequence[int], ranks: int) -> list[int]:
    """``wanted``, with each rank's experts in another order: one that the rank holds already stays in its slot."""
    each = len(held) // ranks
    placed: list[int] = []
    for rank in range(ranks):
        own = slice(rank * each, (rank + 1) * each)
        coming = list(wanted[own])
        slots: list[int | None] = []
        for expert in held[own]:
            stays = expert in coming
            slots.append(expert if stays else None)
            if stays:
                coming.remove(expert)
        placed += [coming.pop(0) if expert is None else expert for expert in slots]
    return placed


def moves_between(held: Sequence[int], placed: Sequence[int], ranks: int) -> list[Move]:
    """For every slot that changes, one that holds its new expert now: on the same rank if there is one, otherwise the
    holders take turns. In order of targets.

    Raises:
        ValueError: an expert of ``placed`` lies nowhere.
    """
    each = len(held) // ranks
    holders: dict[int, list[int]] = {}
    nearest: dict[tuple[int, int], int] = {}
    for slot, expert in enumerate(held):
        holders.setdefault(expert, []).append(slot)
        nearest.setdefault((expert, slot // each), slot)
    turns = dict.fromkeys(holders, 0)
    moves = []
    for target, expert in enumerate(placed):
        if held[target] == expert:
            continue
        if expert not in holders:
            raise ValueError(f"expert {expert} lies in no slot")
        source = nearest.get((expert, target // each))
        if source is None:
            source = holders[expert][turns[expert] % len(holders[expert])]
            turns[expert] += 1
        moves.append(Move(target, source))
    return moves
