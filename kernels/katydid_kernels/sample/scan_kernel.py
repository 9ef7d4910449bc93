"""The pass over the whole vocabulary: what is left of each row is the maximum of every group of 16 tokens.

Everything after it reads a few groups: the k-th largest of the groups' maxima is a lower bound of the k-th largest
logit. A tile is 4,096 tokens as ``[4, 256, 4]``, group i the 16 tokens ``[:, i, :]``, which lie in one thread. Rows
that sample without filters leave the maxima of logit plus noise instead. What a program does once, it does for SPAN
tiles; no result depends on it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from katydid_kernels.sample.row_values import adjusted_logits, largest, noisy_bound

__all__ = ["GROUPS", "TILE", "scan_kernel"]

TILE = 4096
GROUPS = 256


@triton.jit
def scan_kernel(
    logits_ptr, logits_stride, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, seen_ptr, seen_stride,
    pending_ptr, bias_starts_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, allowed_stride, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, group_max_ptr, tile_sums_ptr, vocab,
    tiles, PENDING: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Program (SPAN tiles, row) writes 256 maxima of each, and its maximum and its sum of exponentials over that if the
    row's total is wanted. Without ``temperature_ptr``: plain logits, and the sum of every row.

    EARLY: launched while the kernel that makes the logits runs. FOLLOWED: the next launch waits for this one.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    first_tile = tl.program_id(0) * SPAN
    row = tl.program_id(1).to(tl.int64)
    group = tl.arange(0, 256)
    fours = tl.arange(0, 4 * SPAN)[:, None] * 256 + group[None, :]
    source = (
        logits_ptr, logits_stride, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, seen_ptr, seen_stride,
        pending_ptr, bias_starts_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, allowed_stride,
    )  # fmt: skip
    temperature = 1.0
    wants_sum = True
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        all_k = (top_k <= 0) | (top_k >= vocab)
        wants_sum = (temperature > 0) & (top_p < 1) & all_k
        free = (temperature > 0) & (top_p >= 1) & all_k & (tl.load(min_p_ptr + row) <= 0)
    first = first_tile * 4096
    x, _ = adjusted_logits(row, fours, fours >= 0, vocab, first, first + SPAN * 4096, source, PENDING, EARLY)
    if temperature_ptr is not None:  # noqa: SIM102 - settled as the kernel is compiled
        if free:
            seed = tl.load(seeds_ptr + row).to(tl.uint64)
            scaled = x * tl.div_rn(1.0, temperature)
            x = noisy_bound(scaled, first // 4 + fours, seed, tl.load(positions_ptr + row))
    best = tl.reduce(tl.reshape(tl.reduce(x, 2, largest), (SPAN, 4, 256)), 1, largest)
    tile = first_tile + tl.arange(0, SPAN)
    place = row * tiles + tile
    tl.store(group_max_ptr + place[:, None] * 256 + group[None, :], best, mask=(tile < tiles)[:, None])
    if wants_sum:
        maximum = tl.max(best, 1)
        finite = tl.where(maximum == float("-inf"), 0.0, maximum)
        by_tile = tl.reshape(x, (SPAN, 4, 256, 4))
        mass = tl.exp2((by_tile - finite[:, None, None, None]) * (1.4426950408889634 / temperature))
        tl.store(tile_sums_ptr + place * 2, maximum, mask=tile < tiles)
        tl.store(tile_sums_ptr + place * 2 + 1, tl.sum(tl.sum(tl.sum(mass, 3), 1), 1), mask=tile < tiles)
