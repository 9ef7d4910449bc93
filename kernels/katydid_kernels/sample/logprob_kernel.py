"""Log probabilities after the scan of plain logits: one program a row sums the tiles and ranks the likeliest tokens."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from katydid_kernels.sample.choose_kernel import collect, listed_tile, ranked
from katydid_kernels.sample.groups import column_maxima, kth_bound, list_groups
from katydid_kernels.sample.row_values import row_terms

__all__ = ["logprob_kernel"]


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["group_max_ptr"])
def logprob_kernel(
    logits_ptr, logits_stride, token_ids_ptr, group_max_ptr, tile_sums_ptr, list_ptr, values_ptr, ids_ptr, chosen_ptr,
    top_ids_ptr, top_ptr, vocab, num_top, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr, CANDIDATES: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """FOLLOWS: launched while `scan_kernel` runs."""
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.load(logits_ptr + row * logits_stride + tl.load(token_ids_ptr + row)).to(tl.float32)
    source = (logits_ptr, logits_stride, None, None, None, None, None, 0, None, None, None, None, None, 0)
    terms = row_terms(row, source)
    list_ptr += row * TILES * 256
    values_ptr += row * CANDIDATES
    ids_ptr += row * CANDIDATES
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
        maxima_ptr = group_max_ptr + row * TILES * 256
        bound = kth_bound(maxima_ptr, column_maxima(maxima_ptr, TILES), num_top, TILES)
        listed = list_groups(maxima_ptr, bound, list_ptr, TILES)
        found = 0
        first = 0
        while (first < listed) & (found <= CANDIDATES):
            x, token = listed_tile(row, list_ptr, first, listed, vocab, source, terms, 0)
            x = tl.where(token < vocab, x, float("-inf"))
            found = collect(x, token, bound, found, values_ptr, ids_ptr, CANDIDATES)
            first += 128
        tl.debug_barrier()
        if found <= CANDIDATES:
            c = tl.arange(0, CANDIDATES)
            x = tl.load(values_ptr + c, mask=c < found, other=float("-inf"))
            token = tl.load(ids_ptr + c, mask=c < found, other=2147483647)
            rank, _mass = ranked(x, token, found, values_ptr, ids_ptr, 1.0, maximum, CANDIDATES)
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
                    x, token = listed_tile(row, list_ptr, first, listed, vocab, source, terms, 0)
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
