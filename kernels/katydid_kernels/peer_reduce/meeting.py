"""How the programs of one kernel on several ranks wait for each other: flags that only grow, and a bounded patience.

Program p of a rank meets program p of the others alone. It tells each that it has come, and with that publishes all
that it has written before; then it waits until all others have.
"""

import triton
import triton.language as tl

__all__ = ["count_round", "meet"]


@triton.jit
def meet(pointers_ptr, signals_offset, rank, number, state_ptr, patience, RANKS: tl.constexpr):
    """Waits for the same program of every rank to reach meeting ``number``; after ``patience`` looks at a flag it sets
    the error word of the state and goes on.
    """
    tl.debug_barrier()
    flags = signals_offset + tl.program_id(0) * RANKS
    for peer in tl.static_range(RANKS):
        theirs = tl.load(pointers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + flags + rank, number, sem="release", scope="sys")
    mine = tl.load(pointers_ptr + rank).to(tl.pointer_type(tl.int32)) + flags
    for peer in tl.static_range(RANKS):
        looks = 0
        seen = tl.atomic_add(mine + peer, 0, sem="acquire", scope="sys")
        while (seen < number) & (looks < patience):
            seen = tl.atomic_add(mine + peer, 0, sem="acquire", scope="sys")
            looks += 1
        if seen < number:
            tl.store(state_ptr + 3, 1)
    tl.debug_barrier()


@triton.jit
def count_round(state_ptr, number, rows):
    """The last program of a launch to come here counts the round: all have read its number by then."""
    tl.debug_barrier()
    programs = tl.num_programs(0)
    if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel") == programs - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr + 2, rows)
        tl.store(state_ptr, number + 1)
