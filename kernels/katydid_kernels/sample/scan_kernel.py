"""The pass over the whole vocabulary: what is left of each row is the maximum of every group of 16 tokens.

Everything after it reads a few groups: the k-th largest of the groups' maxima is a lower bound of the k-th largest
logit. A tile is 4,096 tokens as ``[256, 4, 4]``, group i the 16 tokens ``[i]``, which lie in one thread: four times
four that follow one another, a quarter of a tile apart (the compiler deals threads along the first dimension). Rows
that sample without filters leave the maxima of logit plus noise instead. A program takes several tiles of a row, so
that what it reads of the row it reads once; three programs an SM hide each other's waits.
"""

import functools

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from katydid_kernels.sample.row_values import adjusted_logits, largest, noisy_bound, raw_logits, row_terms

__all__ = ["GROUPS", "TILE", "scan_kernel", "tiles_a_program"]

TILE = 4096
GROUPS = 256
_PROGRAMS_AN_SM = 2


@functools.lru_cache(maxsize=4096)
def tiles_a_program(rows: int, tiles: int, sms: int) -> int:
    """So many that the GPU is full from beginning to end; a program costs about one tile more than its tiles."""

    def cost(span: int) -> int:
        return -(-rows * -(-tiles // span) // (_PROGRAMS_AN_SM * sms)) * (span + 1)

    return min(range(1, tiles + 1), key=cost)


# Of maxima whose alignment it does not know, the compiler gives a thread one: the one that it has computed.
@triton.jit(do_not_specialize=["tiles", "span"], do_not_specialize_on_alignment=["group_max_ptr"])
def scan_kernel(
    logits_ptr, logits_stride, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, seen_ptr, seen_stride,
    pending_ptr, bias_starts_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, allowed_stride, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, group_max_ptr, tile_sums_ptr, vocab,
    tiles, span, PENDING: tl.constexpr, EARLY: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Program (span tiles, row) writes 256 maxima of each, and its maximum and its sum of exponentials over that if the
    row's total is wanted. Without ``temperature_ptr``: plain logits, and the sum of every row.

    EARLY: launched while the kernel that makes the logits runs. FOLLOWED: the next launch waits for this one.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    group = tl.arange(0, 256)
    fours = group[:, None] + tl.arange(0, 4)[None, :] * 256
    source = (
        logits_ptr, logits_stride, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, seen_ptr, seen_stride,
        pending_ptr, bias_starts_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, allowed_stride,
    )  # fmt: skip
    terms = row_terms(row, source)
    inverse_temperature = 1.0
    wants_sum = True
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        all_k = (top_k <= 0) | (top_k >= vocab)
        wants_sum = (temperature > 0) & (top_p < 1) & all_k
        free = (temperature > 0) & (top_p >= 1) & all_k & (tl.load(min_p_ptr + row) <= 0)
        inverse_temperature = tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))
        seed = tl.load(seeds_ptr + row).to(tl.uint64)
        position = tl.load(positions_ptr + row)
    if EARLY:
        gdc_wait()
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, tiles)
    raw = raw_logits(row, fours, fours >= 0, vocab, begin * 4096, source, terms)
    for tile in range(begin, end):
        first = tile * 4096
        following = raw_logits(row, fours, (fours >= 0) & (tile + 1 < end), vocab, first + 4096, source, terms)
        x, _ = adjusted_logits(raw, row, fours, first, first + 4096, source, terms, PENDING)
        raw = following
        if temperature_ptr is not None:  # noqa: SIM102 - settled as the kernel is compiled
            if free:
                x = noisy_bound(x * inverse_temperature, first // 4 + fours, seed, position)
        best = tl.reduce(tl.reduce(x, 2, largest), 1, largest)
        place = row * tiles + tile
        tl.store(group_max_ptr + place * 256 + group, best)
        if wants_sum:
            maximum = tl.max(best, 0)
            finite = tl.where(maximum == float("-inf"), 0.0, maximum)
            mass = tl.exp2((x - finite) * (1.4426950408889634 * inverse_temperature))
            tl.store(tile_sums_ptr + place * 2, maximum)
            tl.store(tile_sums_ptr + place * 2 + 1, tl.sum(tl.sum(tl.sum(mass, 2), 1), 0))
