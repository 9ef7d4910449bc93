"""The shared-memory ring that a producer warp fills and consumer warpgroups drain, and the order of tiles and kernels.

Every stage has two mbarriers: `full` completes when the copies of its operands have landed, `empty` when every consumer
has finished reading. Producer and consumers walk the ring in step, each with its own (stage, phase): the phase flips at
each lap, and waiting for the phase before the first one returns at once, which is how an empty ring starts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

__all__ = ["advance", "banded_tile", "before", "fence_async_global", "launch_next", "make_barriers", "wait_for_last"]


@gluon.jit
def wait_for_last():
    """Wait until the kernel launched before has finished, where this one was launched early (PDL); else do nothing."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_next():
    """Let the next kernel, if it may be launched early, take the SMs this one leaves and set itself up."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_async_global():
    """Between ordinary accesses to global memory and the copy engine's of the same data, on either side."""
    gl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, full_count: gl.constexpr, empty_count: gl.constexpr):
    """`full` and `empty` barriers of a ring, initialised and visible to the copy engine."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=full_count)
        mbarrier.init(empty.index(i), count=empty_count)
    fence_async_shared()
    return full, empty


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next place in the ring."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    """The stage ahead of this one. (Triton 3.6 mistakes a loop variable that trails another for a constant.)"""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def banded_tile(item, tiles_m, tiles_n, BAND: gl.constexpr):
    """Tile of work item `item`: down the rows of a band `BAND` tiles high, then to the next column.

    CTAs that run together then share `BAND` rows of A and few columns of B, which stay in L2.
    """
    band = BAND * tiles_n
    first = (item // band) * BAND
    height = gl.minimum(tiles_m - first, BAND)
    within = item % band
    return first + within % height, within // height
