"""Who does what in the decode kernel of experts, and when: the plan's tiles, a CTA's share of them, and the counters on
which CTAs wait for each other.

plan: a `RoutePlan`'s rows and tiles, the ids of all pairs, the first local expert and how many there are. Without rows
and tiles every pair is a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["count", "down_share", "expert_of", "rows_of", "wait_for"]


@gluon.jit
def wait_for(counter_ptr, count):
    """Spin until the counter has reached `count`; what was written before it was counted is then visible."""
    seen = 0
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def count(counter_ptr):
    """Publish what this warpgroup has stored."""
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")


@gluon.jit
def expert_of(tile, plan):
    """Index of the tile's weights. Without a plan every pair is a tile."""
    if plan[1] is None:
        expert = gl.load(plan[2] + tile) - plan[3]
        expert = gl.where((expert >= 0) & (expert < plan[4]), expert, 0)
    else:
        expert = gl.load(plan[1] + tile * 4)
    return expert


@gluon.jit
def rows_of(tile, plan):
    """First row and end of the rows of a tile: without a plan one row, or none where its expert is not local."""
    if plan[1] is None:
        expert = gl.load(plan[2] + tile) - plan[3]
        row = tile
        end = gl.where((expert >= 0) & (expert < plan[4]), tile + 1, tile)
    else:
        row = gl.load(plan[1] + tile * 4 + 1)
        end = gl.load(plan[1] + tile * 4 + 2)
    return row, end


@gluon.jit
def down_share(shape, strips, RUN: gl.constexpr):
    """First and end of this CTA's down items: two strips of a tile, or one strip of a token's RUN tiles."""
    items = shape[0] * shape[2] if RUN == 1 else shape[0] // RUN * strips
    return items * gl.program_id(0) // gl.num_programs(0), items * (gl.program_id(0) + 1) // gl.num_programs(0)
