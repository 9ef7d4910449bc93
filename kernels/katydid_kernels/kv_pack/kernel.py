"""One kernel for both directions: a program moves one run (a page's K or V of one head) and sums it in passing."""

import triton
import triton.language as tl

__all__ = ["move_runs_kernel"]


@triton.jit
def _multipliers(word):
    """`checksum.multipliers` of int32 word numbers."""
    z = (word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def move_runs_kernel(
    bases_ptr, page_ids_ptr, objects_ptr, slot_ids_ptr, checksums_ptr, items, layers, heads,
    slot_words, object_heads, first_head, first_layer,
    RUN: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Moves `items` = blocks x layers x heads x 2 runs of RUN 32-bit words.

    bases: int64 ``[layers, 2]``, the addresses of each layer's K and V pages; objects: int32 words, a slot every
    `slot_words`; checksums: int64 ``[blocks]`` to add to, or None. Neighbouring programs take neighbouring runs of an
    object, so that the link sees long streaks.
    """
    lane = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        side = item % 2
        head = item // 2 % heads
        layer = item // (2 * heads) % layers
        block = item // (2 * heads * layers)
        page = tl.load(page_ids_ptr + block).to(tl.int64)
        slot = tl.load(slot_ids_ptr + block).to(tl.int64)
        base = tl.load(bases_ptr + layer * 2 + side).to(tl.pointer_type(tl.int32))
        first = (((first_layer + layer) * object_heads + first_head + head) * 2 + side) * RUN
        page_run = tl.multiple_of(base + (page * heads + head) * RUN, 16)
        object_run = tl.multiple_of(objects_ptr + slot * slot_words + first, 16)
        total = tl.zeros([BLOCK], tl.uint64)
        for start in tl.static_range(0, RUN, BLOCK):
            word = start + lane
            inside = word < RUN
            if PACK:
                value = tl.load(page_run + word, mask=inside, other=0)
                tl.store(object_run + word, value, mask=inside)
            else:
                value = tl.load(object_run + word, mask=inside, other=0)
                tl.store(page_run + word, value, mask=inside)
            if checksums_ptr is not None:
                total += value.to(tl.uint32, bitcast=True).to(tl.uint64) * _multipliers(first + word)
        if checksums_ptr is not None:
            tl.atomic_add(checksums_ptr + block, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")
