"""How the programs of one kernel on several ranks wait for each other: flags that only grow, and a bounded patience.

Program p of a rank meets program p of the others alone. It tells each that it has come, and with that publishes all
that it has written before; then it waits until all others have.
"""

import triton
import triton.language as tl

__all__ = ["meet"]


@triton.jit
def _fenced(number):
    """The number, once all that this thread has seen and written is in order for every GPU."""
    return tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def meet(pointers_ptr, signals_offset, rank, number, failed_ptr, patience, RANKS: tl.constexpr):
    """Waits for the same program of every rank to reach meeting ``number``; after ``patience`` looks at the flags it
    sets the word at ``failed`` and goes on.
    """
    peer = tl.arange(0, RANKS)
    flags = signals_offset + tl.program_id(0) * RANKS
    theirs = tl.load(pointers_ptr + peer).to(tl.pointer_type(tl.int32)) + flags + rank
    mine = tl.load(pointers_ptr + rank).to(tl.pointer_type(tl.int32)) + flags + peer
    # The barrier brings the writes of all threads before the fences, a flag lies behind its thread's fence.
    tl.debug_barrier()
    tl.atomic_xchg(theirs, _fenced(number) + peer * 0, sem="relaxed", scope="sys")
    seen = tl.min(tl.load(mine, volatile=True), 0)
    looks = 0
    while (seen < number) & (looks < patience):
        seen = tl.min(tl.load(mine, volatile=True), 0)
        looks += 1
    if _fenced(seen) < number:
        tl.store(failed_ptr, 1)
    tl.debug_barrier()
