"""The order of work in the single-launch expert kernels: who takes which down tiles, and the counters they wait on.

Every CTA takes gate-up tiles first, dealt round robin, then a stretch of the down tiles. A down tile waits for counters
that gate-up tiles count up, never the other way round, so CTAs that are all on the GPU at once cannot wait in a circle.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.gemm.ring import fence_async_global

__all__ = ["count", "down_share", "nth_item", "wait_for_count"]


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
def down_share(tiles, up_n, down_n, up_size, down_size):
    """The down tiles of this CTA: how many, the first, and after how many to jump how far; see `nth_item`.

    A tile is `up_n` gate-up tiles, dealt round robin, and `down_n` down tiles; the sizes say how long one of either
    kind takes. A CTA with one gate-up tile fewer takes as many more down tiles as take the time of one. Where none has
    more than one, all down tiles wait for those: they go to the CTAs without if there are enough of them, else evenly.

    The CTAs with a gate-up tile more take the last down tiles, which are the ones that wait for the last gate-up tiles.
    Of those they have no time for, the others take a few each, after their own: nobody stands still for them.
    """
    ctas = gl.num_programs(0)
    up = tiles * up_n
    down = tiles * down_n
    longer = up % ctas
    shorter = ctas - longer
    extra = gl.minimum(shorter * up_size // down_size, down)
    rest = (down - extra) % ctas
    share = (down - extra) // ctas * shorter + extra + gl.where(rest <= shorter, rest, rest * shorter // ctas)
    share = gl.where(longer == 0, down, share)
    share = gl.where(up <= ctas, gl.where(down <= shorter, down, down * shorter // ctas), share)
    late = down - (up - longer) // up_n * down_n
    late = gl.where((up <= ctas) | (longer == 0), 0, late)
    over = gl.maximum(late - (down - share), 0)
    me = gl.program_id(0)
    if me < longer:
        first = share + (down - share) * me // longer
        split = share + (down - share) * (me + 1) // longer - first
        jump = 0
        number = split
    else:
        me -= longer
        first = (share - over) * me // shorter
        split = (share - over) * (me + 1) // shorter - first
        second = down - late + over * me // shorter
        jump = second - first - split
        number = split + down - late + over * (me + 1) // shorter - second
    return number, first, split, jump


@gluon.jit
def nth_item(i, share):
    """The down tile that a CTA takes as its i-th."""
    _, first, split, jump = share
    return first + i + gl.where(i >= split, jump, 0)
