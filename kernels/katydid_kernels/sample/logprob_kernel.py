"""Log probabilities after the scan of plain logits: one program a row sums the tiles and ranks the likeliest tokens."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from katydid_kernels.sample.candidates import (
    BANNED,
    collect,
    listed_tile,
    logit_of,
    nth_candidates,
    ranks,
    token_of,
)
from katydid_kernels.sample.groups import group_maxima, kth_bound, list_groups
from katydid_kernels.sample.row_values import row_terms

__all__ = ["logprob_kernel"]


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["group_max_ptr"])
def logprob_kernel(
    logits_ptr, logits_stride, token_ids_ptr, group_max_ptr, tile_sums_ptr, list_ptr, candidates_ptr, chosen_ptr,
    top_ids_ptr, top_ptr, vocab, num_top, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr, CANDIDATES: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """FOLLOWS: launched while `scan_kernel` runs."""
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.load(logits_ptr + row * logits_stride + tl.load(token_ids_ptr + row)).to(tl.float32)
    source = (logits_ptr, logits_stride, None, None, None, None, None, 0, None, None, None, None, None, 0)
    terms = row_terms(row, source)
    list_ptr += row * TILES * 256
    candidates_ptr += row * CANDIDATES
    if FOLLOWS:
        gdc_wait()
    tile = tl.arange(0, BLOCK_TILES)
    sums = tile_sums_ptr + (row * TILES + tile) * 2
    tile_max = tl.load(sums, mask=tile < TILES, other=float("-inf"))
    tile_sum = tl.load(sums + 1, mask=tile < TILES, other=0.0)
    maximum = tl.max(tile_max, 0)
    total = tl.sum(tile_sum * tl.exp(tile_max - maximum), 0)
    logarithm = maximum + tl.log(total)
    tl.store(chosen_ptr + row, chosen - logarithm)
    if num_top > 0:
        maxima, column_max = group_maxima(group_max_ptr + row * TILES * 256, TILES, BLOCK_TILES)
        bound = tl.maximum(kth_bound(maxima, column_max, maximum, num_top), BANNED)
        listed = list_groups(maxima, bound, list_ptr, TILES, BLOCK_TILES)
        found = 0
        first = 0
        while (first < listed) & (found <= CANDIDATES):
            x, token = listed_tile(row, list_ptr, first, listed, vocab, source, terms, 256, 0)
            found = collect(x, token, bound, found, candidates_ptr, CANDIDATES)
            first += 256
        tl.debug_barrier()
        if found <= CANDIDATES:
            c = tl.arange(0, CANDIDATES)
            candidate = nth_candidates(candidates_ptr, c, found)
            x = logit_of(candidate)
            token = token_of(candidate)
            rank = ranks(candidate, candidates_ptr, found, CANDIDATES, 8)
            wanted = (c < found) & (rank < num_top)
            tl.store(top_ids_ptr + row * num_top + rank, token, mask=wanted)
            tl.store(top_ptr + row * num_top + rank, x - logarithm, mask=wanted)
        else:
            # One after the other, each the first behind the last.
            limit = float("inf")
            limit_token = 0
            for place in range(num_top):
                best = float("-inf")
                best_token = 2147483647
                for first in range(0, listed, 128):
                    x, token = listed_tile(row, list_ptr, first, listed, vocab, source, terms, 128, 0)
                    x = tl.reshape(x, (2048,))
                    token = tl.reshape(token, (2048,))
                    behind = (x < limit) | ((x == limit) & (token > limit_token))
                    behind &= token < vocab
                    tile_best = tl.max(tl.where(behind, x, float("-inf")), 0)
                    tile_token = tl.min(tl.where(behind & (x == tile_best), token, 2147483647), 0)
                    better = (tile_best > best) | ((tile_best == best) & (tile_token < best_token))
                    best_token = tl.where(better, tile_token, best_token)
                    best = tl.where(better, tile_best, best)
                tl.store(top_ids_ptr + row * num_top + place, best_token)
                tl.store(top_ptr + row * num_top + place, best - logarithm)
                limit = best
                limit_token = best_token
