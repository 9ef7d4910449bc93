"""One program a row: from the groups' maxima to the token.

1. A lower bound of everything that the filters keep, from the groups' maxima alone: the k-th largest of them for
   top-k, the largest whose followers' mass reaches top-p, a share of the maximum for min-p.
2. The tokens at or above it are collected from the groups that can have any. If few (as a rule), each counts the tokens
   before it and their mass: that is its rank and what top-p compares, without a sort.
3. If many, the winner of all of them is drawn first and then looked up: if the filters keep it, it is the winner of
   what they keep, which is a subset. If not, nothing at or below it is kept, and the draw is repeated above it.

Order is by logit, then by id. Sums are over fixed tiles in a fixed order: no result depends on the batch.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from katydid_kernels.sample.candidates import (
    BANNED,
    collect,
    listed_fours,
    listed_tile,
    logit_of,
    nth_candidates,
    ranks,
    token_of,
)
from katydid_kernels.sample.groups import group_maxima, kth_bound, list_groups, mass_bound
from katydid_kernels.sample.row_values import (
    adjusted_logits,
    gumbel_about,
    gumbel_at,
    key_value,
    largest,
    noisy_bound,
    order_key,
    raw_logits,
    row_terms,
)

__all__ = ["choose_kernel"]

LOWEST = tl.constexpr(-2147483648)
# Groups that are read at once: where few are listed as a rule, where many are, and for the candidates.
FEW = tl.constexpr(16)
MANY = tl.constexpr(128)
WIDE = tl.constexpr(256)


@triton.jit
def _flat_tile(row, list_ptr, first, listed, vocab, source, terms, GROUPS: tl.constexpr, PENDING: tl.constexpr):
    x, token = listed_tile(row, list_ptr, first, listed, vocab, source, terms, GROUPS, PENDING)
    return tl.reshape(x, (16 * GROUPS,)), tl.reshape(token, (16 * GROUPS,))


@triton.jit
def _count(row, key, list_ptr, listed, vocab, source, terms, PENDING: tl.constexpr):
    """How many tokens of the listed groups reach the key."""
    count = 0
    for first in range(0, listed, MANY):
        x, _token = _flat_tile(row, list_ptr, first, listed, vocab, source, terms, MANY, PENDING)
        count += tl.sum((order_key(x) >= key).to(tl.int32), 0)
    return count


@triton.jit
def _mass(x, inverse_temperature, scaled_max):
    """Probability over that of the likeliest token."""
    return tl.exp2((x * inverse_temperature - scaled_max) * 1.4426950408889634)


@triton.jit
def _mass_of_top_k(row, filters, list_ptr, listed, vocab, source, terms, PENDING: tl.constexpr):
    """Finds the k-th largest logit, a bit at a time."""
    inverse_temperature, top_k, _top_p, _min_p, scaled_max = filters
    kth = tl.where(_count(row, 0, list_ptr, listed, vocab, source, terms, PENDING) >= top_k, 0, LOWEST)
    step = 1 << 30
    for _ in range(31):
        higher = kth + step
        kth = tl.where(_count(row, higher, list_ptr, listed, vocab, source, terms, PENDING) >= top_k, higher, kth)
        step = step >> 1
    above = 0
    total = 0.0
    for first in range(0, listed, MANY):
        x, _token = _flat_tile(row, list_ptr, first, listed, vocab, source, terms, MANY, PENDING)
        larger = order_key(x) > kth
        above += tl.sum(larger.to(tl.int32), 0)
        total += tl.sum(tl.where(larger, _mass(x, inverse_temperature, scaled_max), 0.0), 0)
    return total + (top_k - above).to(tl.float32) * _mass(key_value(kth), inverse_temperature, scaled_max)


@triton.jit
def _winner(score, token, keep):
    """The largest score of those kept, and its token: of equals the lowest."""
    best = tl.max(tl.where(keep, score, float("-inf")), 0)
    return best, tl.min(tl.where(keep & (score == best), token, 2147483647), 0)


@triton.jit
def _best(
    row, inverse_temperature, seed, position, list_ptr, listed, vocab, source, terms, GROUPS: tl.constexpr,
    NOISY: tl.constexpr, PENDING: tl.constexpr,
):  # fmt: skip
    """The likeliest token, or the winner of all, in the groups that may hold it."""
    best = float("-inf")
    winner = 0
    for first in range(0, listed, GROUPS):
        x, token = _flat_tile(row, list_ptr, first, listed, vocab, source, terms, GROUPS, PENDING)
        score = x
        if NOISY:
            score = x * inverse_temperature + gumbel_at(seed, position, token)
        tile_best, tile_token = _winner(score, token, x > float("-inf"))
        better = (tile_best > best) | ((tile_best == best) & (tile_token < winner))
        winner = tl.where(better, tile_token, winner)
        best = tl.where(better, tile_best, best)
    return winner


@triton.jit
def _of_few(total, filters, seed, position, found, candidates_ptr, SIZE: tl.constexpr, STEP: tl.constexpr):
    """The winner of the candidates that are kept; ``total`` is the mass of all tokens, for rows without top-k.

    What top-p drops is known by the winner alone: if it is not kept, neither is anything behind it.
    """
    inverse_temperature, top_k, top_p, min_p, scaled_max = filters
    c = tl.arange(0, SIZE)
    candidate = nth_candidates(candidates_ptr, c, found)
    x = logit_of(candidate)
    token = token_of(candidate)
    mass = _mass(x, inverse_temperature, scaled_max)
    keep = c < found
    if top_k > 0:
        if top_k < found:
            keep &= ranks(candidate, candidates_ptr, found, SIZE, STEP) < top_k
        total = tl.sum(tl.where(keep, mass, 0.0), 0)
    keep &= mass >= min_p
    limit = tl.where(top_p < 1, top_p * total, float("inf"))
    scaled = x * inverse_temperature
    noisy = scaled + gumbel_about(seed, position, token)
    winner = token_of(nth_candidates(candidates_ptr, 0, 1))
    drawing = True
    while drawing:
        about = tl.where(keep, noisy, float("-inf"))
        best = tl.max(about, 0)
        # As a rule one alone may win; its place and how many they are come out of one sum.
        close = keep & (about >= best - 1e-3 - tl.abs(best) * 1e-6)
        packed = tl.sum(tl.where(close, (1 << 20) + c, 0), 0)
        place = packed - (1 << 20)
        if (packed >> 20) != 1:
            _score, first = _winner(scaled + gumbel_at(seed, position, token), token, keep)
            place = tl.sum(tl.where(token == first, c, 0), 0)
        chosen = tl.load(candidates_ptr + place)
        winner = token_of(chosen)
        earlier = candidate > chosen
        drawing = tl.sum(tl.where(earlier, mass, 0.0), 0) >= limit
        keep &= earlier
    return winner


@triton.jit
def _of_many(
    row, bound, total, filters, seed, position, list_ptr, listed, vocab, source, terms, PENDING: tl.constexpr
):  # fmt: skip
    """Draws from all that reach the bound, and again from what comes before the winner until the filters keep one."""
    inverse_temperature, top_k, top_p, min_p, scaled_max = filters
    limit = float("-inf")
    limit_token = 0
    winner = 0
    drawing = True
    while drawing:
        best = float("-inf")
        best_x = float("-inf")
        for first in range(0, listed, MANY):
            fours, valid = listed_fours(list_ptr, first, listed, MANY)
            raw = raw_logits(row, fours, valid, vocab, 0, source, terms)
            x, token = adjusted_logits(raw, row, fours, 0, vocab, source, terms, PENDING)
            alive = (x > limit) | ((x == limit) & (token < limit_token))
            alive &= order_key(x) >= bound
            # Only a tile that may hold the winner is worth exact noise.
            about = tl.where(alive, noisy_bound(x * inverse_temperature, fours, seed, position), float("-inf"))
            may_win = tl.max(tl.reshape(about, (2048,)), 0)
            if (may_win > float("-inf")) & (may_win >= best - 1e-3 - tl.abs(best) * 1e-6):
                flat_x = tl.reshape(x, (2048,))
                flat_token = tl.reshape(token, (2048,))
                score = flat_x * inverse_temperature + gumbel_at(seed, position, flat_token)
                tile_best, tile_token = _winner(score, flat_token, tl.reshape(alive, (2048,)))
                better = (tile_best > best) | ((tile_best == best) & (tile_token < winner))
                tile_x = tl.max(tl.where(flat_token == tile_token, flat_x, float("-inf")), 0)
                winner = tl.where(better, tile_token, winner)
                best_x = tl.where(better, tile_x, best_x)
                best = tl.where(better, tile_best, best)
        rank = 0
        before = 0.0
        for first in range(0, listed, MANY):
            x, token = _flat_tile(row, list_ptr, first, listed, vocab, source, terms, MANY, PENDING)
            precedes = (x > best_x) | ((x == best_x) & (token < winner))
            rank += tl.sum(precedes.to(tl.int32), 0)
            before += tl.sum(tl.where(precedes, _mass(x, inverse_temperature, scaled_max), 0.0), 0)
        kept = ((top_k == 0) | (rank < top_k)) & (_mass(best_x, inverse_temperature, scaled_max) >= min_p)
        kept &= before < tl.where(top_p < 1, top_p * total, float("inf"))
        drawing = (kept == 0) & (rank > 0)
        limit = best_x
        limit_token = winner
    return winner


@triton.jit(do_not_specialize_on_alignment=["group_max_ptr"])
def choose_kernel(
    logits_ptr, logits_stride, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, seen_ptr, seen_stride,
    pending_ptr, bias_starts_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, allowed_stride, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, group_max_ptr, tile_sums_ptr, list_ptr,
    candidates_ptr, out_ptr, sound_ptr, vocab, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr, CANDIDATES: tl.constexpr,
    PENDING: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """FOLLOWS: launched while `scan_kernel` runs."""
    if FOLLOWS:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    seed = tl.load(seeds_ptr + row).to(tl.uint64)
    position = tl.load(positions_ptr + row)
    greedy = temperature <= 0
    top_k = tl.where((top_k <= 0) | (top_k >= vocab), 0, top_k)
    free = (top_k == 0) & (top_p >= 1) & (min_p <= 0) & (temperature > 0)
    temperature = tl.where(greedy, 1.0, temperature)
    inverse_temperature = tl.div_rn(1.0, temperature)
    exponent = 1.4426950408889634 * inverse_temperature
    source = (
        logits_ptr, logits_stride, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, seen_ptr, seen_stride,
        pending_ptr, bias_starts_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, allowed_stride,
    )  # fmt: skip
    terms = row_terms(row, source)
    list_ptr += row * TILES * 256
    candidates_ptr += row * CANDIDATES
    if FOLLOWS:
        gdc_wait()
    maxima, column_max = group_maxima(group_max_ptr + row * TILES * 256, TILES, BLOCK_TILES)
    maximum = tl.reduce(column_max, 0, largest)
    if sound_ptr is not None:
        tl.store(sound_ptr + row, (maximum > float("-inf")) & (maximum < float("inf")))
    token_out = 0
    if maximum > float("-inf"):
        bound = BANNED + 1
        total = 0.0
        rounding = 1e-3 + tl.abs(maximum) * 1e-6
        if greedy:
            bound = order_key(maximum)
        elif free:
            bound = order_key(maximum - rounding)
        else:
            # Top-p is a share of what top-k leaves: then all of that is needed, whatever min-p drops.
            if (min_p > 0) & ((top_k == 0) | (top_p >= 1)):
                bound = tl.maximum(bound, order_key(maximum + temperature * (tl.log(min_p) - 1e-3) - rounding))
            if top_k > 0:
                bound = tl.maximum(bound, kth_bound(maxima, column_max, maximum, top_k))
            elif top_p < 1:
                tile = tl.arange(0, BLOCK_TILES)
                sums = tile_sums_ptr + (row * TILES + tile) * 2
                tile_max = tl.load(sums, mask=tile < TILES, other=float("-inf"))
                tile_sum = tl.load(sums + 1, mask=tile < TILES, other=0.0)
                total = tl.sum(tile_sum * tl.exp2((tile_max - maximum) * exponent), 0)
                wanted = top_p * total * 1.00001
                bound = tl.maximum(bound, mass_bound(maxima, column_max, maximum, exponent, wanted))
        listed = list_groups(maxima, bound, list_ptr, TILES, BLOCK_TILES)
        scaled_max = maximum * inverse_temperature

        if greedy:
            token_out = _best(
                row, 1.0, seed, position, list_ptr, listed, vocab, source, terms, MANY, False, PENDING
            )  # fmt: skip
        elif free:
            token_out = _best(
                row, inverse_temperature, seed, position, list_ptr, listed, vocab, source, terms, FEW, True, PENDING
            )
        else:
            found = 0
            first = 0
            while (first < listed) & (found <= CANDIDATES):
                x, token = listed_tile(row, list_ptr, first, listed, vocab, source, terms, WIDE, PENDING)
                found = collect(x, token, bound, found, candidates_ptr, CANDIDATES)
                first += WIDE
            tl.debug_barrier()
            filters = (inverse_temperature, top_k, top_p, min_p, scaled_max)
            if found <= 128:
                token_out = _of_few(total, filters, seed, position, found, candidates_ptr, 128, 64)
            elif found <= CANDIDATES:
                token_out = _of_few(total, filters, seed, position, found, candidates_ptr, CANDIDATES, 8)
            else:
                if (top_k > 0) & (top_p < 1):
                    total = _mass_of_top_k(row, filters, list_ptr, listed, vocab, source, terms, PENDING)
                token_out = _of_many(
                    row, bound, total, filters, seed, position, list_ptr, listed, vocab, source, terms, PENDING
                )
    # Of logits that are no numbers comes a token all the same.
    tl.store(out_ptr + row, tl.minimum(token_out, vocab - 1))
