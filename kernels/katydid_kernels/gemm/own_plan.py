"""The plan of few pairs, made by every CTA of the experts' kernel for itself: a launch and a wait fewer.

Pairs are ranked by comparing each with all others, which for 128 of them takes less than handing a plan over. The
result is that of `plan.plan_routes`, but experts are in the order in which pairs name them, and so are their rows: the
weights that the first pairs want can then be asked for before the plan is made.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["OWN_PLAN_INTS", "OWN_PLAN_PAIRS", "make_own_plan"]

OWN_PLAN_PAIRS = 128
# int32 a CTA: for each pair its key, a row's token, its slot and the four numbers of a tile.
OWN_PLAN_INTS = 7 * OWN_PLAN_PAIRS

_NOBODY = gl.constexpr(1 << 20)
_PAIRS = gl.constexpr(OWN_PLAN_PAIRS)
_AT_ONCE = gl.constexpr(32)


@gluon.jit
def _experts_of(pair, ids_ptr, pairs, first_expert, experts):
    """Local experts of pairs; `_NOBODY` where there is none."""
    expert = gl.load(ids_ptr + pair, mask=pair < pairs, other=-1) - first_expert
    return gl.where((expert >= 0) & (expert < experts), expert, _NOBODY)


@gluon.jit
def make_own_plan(ids_ptr, pairs, first_expert, experts, plan_ptr, TOP_K: gl.constexpr, TILE: gl.constexpr):
    """Write this CTA's plan, by one warpgroup; returns where its rows, slots and tiles are and how many tiles."""
    across: gl.constexpr = gl.BlockedLayout([1, _AT_ONCE], [32, 1], [4, 1], [1, 0])
    mine: gl.constexpr = gl.SliceLayout(1, across)
    keys_ptr = plan_ptr + gl.program_id(0) * (7 * _PAIRS)
    rows_ptr = keys_ptr + _PAIRS
    slots_ptr = keys_ptr + 2 * _PAIRS
    tiles_ptr = keys_ptr + 3 * _PAIRS
    pair = gl.arange(0, _PAIRS, mine)
    other = gl.arange(0, _AT_ONCE, gl.SliceLayout(0, across))
    expert = _experts_of(pair, ids_ptr, pairs, first_expert, experts)
    local = expert < _NOBODY
    # Its place among the pairs of its expert, how many they are, and the first of them.
    rank = gl.zeros([_PAIRS], gl.int32, mine)
    count = gl.zeros([_PAIRS], gl.int32, mine)
    leader = gl.where(local, pair, _NOBODY)
    for first in range(0, pairs, _AT_ONCE):
        theirs = _experts_of(first + other, ids_ptr, pairs, first_expert, experts)[None, :]
        same = theirs == expert[:, None]
        earlier = same & ((first + other)[None, :] < pair[:, None])
        rank += gl.sum(earlier.to(gl.int32), 1)
        count += gl.sum(same.to(gl.int32), 1)
        leader = gl.minimum(leader, gl.min(gl.where(earlier, (first + other)[None, :], _NOBODY), 1))
    leader = gl.where(local, leader, _NOBODY)
    key = leader * _PAIRS + rank
    gl.store(keys_ptr + pair, key)
    gl.thread_barrier()
    # Experts stand in the order of their leaders. A pair whose rank is a multiple of the tile's rows begins a tile.
    slot = gl.zeros([_PAIRS], gl.int32, mine)
    tile = gl.zeros([_PAIRS], gl.int32, mine)
    for first in range(0, pairs, _AT_ONCE):
        their_key = gl.load(keys_ptr + first + other)
        before = their_key[None, :] < key[:, None]
        begins = (their_key % _PAIRS % TILE == 0) & (their_key < _NOBODY)
        slot += gl.sum(before.to(gl.int32), 1)
        tile += gl.sum((begins[None, :] & before).to(gl.int32), 1)
    begins = local & (rank % TILE == 0)
    gl.store(slots_ptr + pair, gl.where(local, slot, -1))
    gl.store(rows_ptr + slot, pair // TOP_K, mask=local)
    gl.store(tiles_ptr + tile * 4, expert, mask=begins)
    gl.store(tiles_ptr + tile * 4 + 1, slot, mask=begins)
    gl.store(tiles_ptr + tile * 4 + 2, slot - rank + count, mask=begins)
    gl.thread_barrier()
    return rows_ptr, slots_ptr, tiles_ptr, gl.sum(begins.to(gl.int32), 0)
