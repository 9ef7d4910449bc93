"""The order of work in the single-launch expert kernels: who takes which down tiles, and the counters they wait on.

Every CTA takes gate-up tiles first, dealt round robin, then a stretch of the down tiles. A down tile waits for counters
that gate-up tiles count up, never the other way round, so CTAs that are all on the GPU at once cannot wait in a circle.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.gemm.ring import fence_async_global

__all__ = ["count", "down_share", "wait_for_count"]


@gluon.jit
def wait_for_count(counter_ptr, target):
    """Spin until the counter has reached `target`; what was written before it was counted is then visible, to the copy
    engine too."""
    seen = 0
    while seen < target:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
        )
    fence_async_global()


@gluon.jit
def count(counter_ptr):
    """Publish what this warpgroup has stored."""
    fence_async_global()
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")


@gluon.jit
def down_share(up_items, down_items, up_size, down_size):
    """The down tiles of this CTA, first and end; the sizes say how long a tile of either kind takes.

    A CTA with one gate-up tile fewer takes as many more down tiles as take the time of one. Where none has more than
    one, all down tiles wait for those: they go to the CTAs without if there are enough of them, else evenly. The CTAs
    with a gate-up tile more take the last down tiles, which are the ones that wait for the last gate-up tiles: nobody
    else stands still for them.
    """
    ctas = gl.num_programs(0)
    longer = up_items % ctas
    shorter = gl.where(longer == 0, ctas, ctas - longer)
    each = gl.maximum(down_items - shorter * up_size // down_size, 0) // ctas
    each = gl.where(longer == 0, down_items // ctas, each)
    each = gl.where(up_items <= ctas, gl.where(down_items <= shorter, 0, down_items // ctas), each)
    rest = down_items - each * ctas
    me = gl.program_id(0)
    me = gl.where(longer == 0, me, gl.where(me < longer, me + shorter, me - longer))
    begin = each * me + rest * gl.minimum(me, shorter) // shorter
    end = each * (me + 1) + rest * gl.minimum(me + 1, shorter) // shorter
    return begin, end
