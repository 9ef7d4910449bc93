"""What follows the product on the device: partial logits summed, scored, the best experts chosen and weighed.

CTAs that computed slices of the same logits meet at a counter before they read each other's sums; the last one to leave
sets it back to zero. Nothing depends on the order in which they arrive, so a token gets the same bits every time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["arrive", "choose_experts", "leave", "summed_logits", "wait_for"]

# Below the key of every score, so it marks what was chosen already and what is no expert.
_TAKEN = gl.constexpr(-(2**31))


@gluon.jit
def arrive(counter_ptr):
    """Publish what this warpgroup has stored."""
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")


@gluon.jit
def wait_for(counter_ptr, count):
    """Spin until `count` have arrived; what they published is then visible."""
    seen = 0
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def leave(counter_ptr, everyone):
    """Called once by each who waited; the last of `everyone` who arrives or leaves resets the counter."""
    gl.thread_barrier()
    if gl.atomic_add(counter_ptr, 1, sem="relaxed") == everyone - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def summed_logits(
    partial_ptr, split_stride, row, end, E_PAD: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr,
    layout: gl.constexpr, POWER_S: gl.constexpr, POWER_E: gl.constexpr,
):  # fmt: skip
    """fp32 ``[ROWS, POWER_E]``: rows from `row` of partial logits ``[SPLITS, *, E_PAD]``, summed in a fixed order.

    layout: of the ``[POWER_S, ROWS, POWER_E]`` values read; powers of two that hold the splits and the experts.
    """
    split = gl.arange(0, POWER_S, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    expert = gl.arange(0, POWER_E, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    source = partial_ptr + split * split_stride + rows * E_PAD + expert
    # Past the L1, which may hold an older line.
    values = gl.load(source, mask=(split < SPLITS) & (rows < end) & (expert < E_PAD), other=0.0, cache_modifier=".cg")
    return gl.sum(values, 0)


@gluon.jit
def choose_experts(
    logits, row, end, experts, bias_ptr, scale, weights_ptr, ids_ptr,
    TOP_K: gl.constexpr, POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr,
):  # fmt: skip
    """Store weights and ids of the top experts of rows `row` up to `end` from ``logits[ROWS, POWER_E]``."""
    layout: gl.constexpr = logits.type.layout
    rows = row + gl.arange(0, logits.shape[0], gl.SliceLayout(1, layout))
    expert = gl.arange(0, logits.shape[1], gl.SliceLayout(0, layout))[None, :]
    real = expert < experts
    if SIGMOID:
        scores = 1.0 / (1.0 + gl.exp(-logits))
    else:
        logits = gl.where(real, logits, float("-inf"))
        powers = gl.exp(logits - gl.max(logits, 1)[:, None])
        scores = powers / gl.sum(powers, 1)[:, None]
    preference = scores
    if bias_ptr is not None:
        preference += gl.load(bias_ptr + expert, mask=real, other=0.0)
    # The bits of a float as an integer that orders alike (adding zero makes one zero of the two): comparing integers is
    # exact, takes one instruction a warp, and a NaN cannot lead to an expert that does not exist.
    bits = (preference + 0.0).to(gl.int32, bitcast=True)
    key = gl.where(real, gl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _TAKEN + 1), _TAKEN)
    score_bits = scores.to(gl.int32, bitcast=True)
    choice = gl.arange(0, POWER_K, gl.SliceLayout(0, layout))[None, :]
    chosen_ids = gl.zeros([logits.shape[0], POWER_K], gl.int32, layout)
    chosen_bits = gl.zeros([logits.shape[0], POWER_K], gl.int32, layout)
    for j in gl.static_range(TOP_K):
        best = gl.max(key, 1)[:, None]
        first = gl.min(gl.where(key == best, expert, logits.shape[1]), 1)[:, None]
        taken = expert == first
        # A sum with one term that is not zero.
        found = gl.sum(gl.where(taken, score_bits, 0), 1)[:, None]
        key = gl.where(taken, _TAKEN, key)
        chosen_ids = gl.where(choice == j, first, chosen_ids)
        chosen_bits = gl.where(choice == j, found, chosen_bits)
    weights = chosen_bits.to(gl.float32, bitcast=True)
    if RENORMALISE:
        weights = weights / (gl.sum(weights, 1)[:, None] + 1e-20)
    place = rows[:, None] * TOP_K + choice
    inside = (rows < end)[:, None] & (choice < TOP_K)
    gl.store(weights_ptr + place, weights * scale, mask=inside)
    gl.store(ids_ptr + place, chosen_ids, mask=inside)
