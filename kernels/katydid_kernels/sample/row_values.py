"""What the sampler's kernels compute for tokens of a row: the logits after penalties, bias and mask, and the noise.

Tokens come in fours that follow one another, ``[A, B]`` fours a tile: 16 bytes of logits, 8 of seen counts, and the
four words of one Philox counter. Reciprocals are IEEE's and the launches forbid contraction, so that both
kernels and the torch reference come to the same bits.
"""

import triton
import triton.language as tl

__all__ = ["adjusted_logits", "gumbel_about", "gumbel_at", "key_value", "largest", "noisy_bound", "order_key",
           "raw_logits", "row_terms"]  # fmt: skip


@triton.jit
def row_terms(row, source):
    """What a row's logits are adjusted by, whichever tokens they are of: read once, before the logits are there."""
    (
        _logits_ptr, _logits_stride, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, seen_ptr, _seen_stride,
        _pending_ptr, bias_starts_ptr, bias_ids_ptr, _bias_values_ptr, _allowed_ptr, _allowed_stride,
    ) = source  # fmt: skip
    slot = -1
    repetition = 1.0
    frequency = 0.0
    presence = 0.0
    begin = 0
    end = 0
    biased_ids = tl.zeros((32,), tl.int32)
    if seen_ptr is not None:
        slot = tl.load(slots_ptr + row)
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
    if bias_starts_ptr is not None:
        begin = tl.load(bias_starts_ptr + row)
        end = tl.load(bias_starts_ptr + row + 1)
        place = begin + tl.arange(0, 32)
        biased_ids = tl.load(bias_ids_ptr + place, mask=place < end, other=-1)
    return slot, repetition, tl.div_rn(1.0, repetition), frequency, presence, begin, end, biased_ids


@triton.jit
def raw_logits(row, fours, valid, vocab, first, source, terms):
    """What is read of the tokens ``first + 4 * fours + (0 .. 3)``: logits, seen counts, ``[A, B, 4]``, and words of the
    mask, ``[A, B]``; -inf and nothing where not valid or past the last of the vocabulary.

    ``source`` are the kernels' arguments from the logits to the mask, in their order, ``terms`` of `row_terms`.
    ``first`` is a multiple of 32.
    """
    (
        logits_ptr, logits_stride, _slots_ptr, _repetition_ptr, _presence_ptr, _frequency_ptr, seen_ptr, seen_stride,
        _pending_ptr, _bias_starts_ptr, _bias_ids_ptr, _bias_values_ptr, allowed_ptr, allowed_stride,
    ) = source  # fmt: skip
    slot, _repetition, _inverse_repetition, _frequency, _presence, _begin, _end, _biased_ids = terms
    # Offsets from the first token are constants but for the thread's own: addresses cost little.
    local = fours[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    inside = valid[:, :, None] & (local < vocab - first)
    x = tl.load(logits_ptr + row * logits_stride + first + local, mask=inside, other=float("-inf"))
    entry = tl.zeros_like(local)
    if seen_ptr is not None:
        entries = seen_ptr + slot.to(tl.int64) * seen_stride + first
        entry = tl.load(entries + local, mask=inside & (slot >= 0), other=0)
    word = tl.zeros_like(fours)
    if allowed_ptr is not None:
        words = allowed_ptr + row * allowed_stride + first // 32
        word = tl.load(words + fours // 8, mask=valid & (fours * 4 < vocab - first), other=0)
    return x, entry, word


@triton.jit
def _bias(bias_ids_ptr, bias_values_ptr, i, end):
    return tl.load(bias_ids_ptr + i, mask=i < end, other=-1), tl.load(bias_values_ptr + i, mask=i < end, other=0.0)


@triton.jit
def _with_bias(x, token, biased, value, first, last):
    if (biased >= first) & (biased < last):
        x = tl.where(token == biased, x + value, x)
    return x


@triton.jit
def adjusted_logits(raw, row, fours, first, last, source, terms, PENDING: tl.constexpr):
    """fp32 ``[A, B, 4]`` of what `raw_logits` read, and the tokens. All lie before ``last``: bias of others is passed
    over.
    """
    (
        _logits_ptr, _logits_stride, _slots_ptr, _repetition_ptr, _presence_ptr, _frequency_ptr, seen_ptr,
        _seen_stride, pending_ptr, bias_starts_ptr, bias_ids_ptr, bias_values_ptr, allowed_ptr, _allowed_stride,
    ) = source  # fmt: skip
    slot, repetition, inverse_repetition, frequency, presence, begin, end, biased_ids = terms
    x, entry, word = raw
    x = x.to(tl.float32)
    token = first + fours[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    # Two conditions: the first is settled as the kernel is compiled.
    if seen_ptr is not None:  # noqa: SIM102
        if slot >= 0:
            seen = entry.to(tl.int32)
            count = seen & 0x7FFF
            touched = seen != 0
            if pending_ptr is not None:
                for i in range(PENDING):
                    count += (token == tl.load(pending_ptr + row * PENDING + i)).to(tl.int32)
                touched |= count > 0
            factor = tl.where(x > 0, inverse_repetition, repetition)
            x = tl.where(touched, x * factor, x)
            # An integer in the mantissa of 2**23: its conversion would go at a quarter of the rate of all else.
            times = (count | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
            x = x - frequency * times
            x = tl.where(times > 0, x - presence, x)
    if bias_starts_ptr is not None:
        near = tl.sum(((biased_ids >= first) & (biased_ids < last)).to(tl.int32), 0) > 0
        if near | (end - begin > 32):
            # Four at a time: their reads are under way together.
            for i in range(begin, end, 4):
                id0, value0 = _bias(bias_ids_ptr, bias_values_ptr, i, end)
                id1, value1 = _bias(bias_ids_ptr, bias_values_ptr, i + 1, end)
                id2, value2 = _bias(bias_ids_ptr, bias_values_ptr, i + 2, end)
                id3, value3 = _bias(bias_ids_ptr, bias_values_ptr, i + 3, end)
                x = _with_bias(x, token, id0, value0, first, last)
                x = _with_bias(x, token, id1, value1, first, last)
                x = _with_bias(x, token, id2, value2, first, last)
                x = _with_bias(x, token, id3, value3, first, last)
    if allowed_ptr is not None:
        four_bits = word >> (fours % 8 * 4)
        x = tl.where((four_bits[:, :, None] & (1 << tl.arange(0, 4))[None, None, :]) != 0, x, float("-inf"))
    return x, token


@triton.jit
def largest(a, b):
    """Of a reduction: the larger, and what is no number before all others."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def order_key(x):
    """int32 that orders as the floats do; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float of an order key; of keys beyond those of the infinities, none that anything reaches."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _uniform(word):
    """(word + 1/2) / 2**32 rounded to fp32, below 1."""
    exact = ((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32)
    return tl.minimum(exact, 0.999999940395355224609375)


@triton.jit
def _word(seed, position, token):
    """The random word of single tokens."""
    counter = (token // 4).to(tl.uint32)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero)
    return tl.where(token % 2 == 0, tl.where(token % 4 == 0, w0, w2), tl.where(token % 4 == 1, w1, w3))


@triton.jit
def _about(word):
    """Noise to within 1e-4, without fp64."""
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    exponential = tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * (1.0 / 3.0))), -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def gumbel_about(seed, position, token):
    """The noise of single tokens to within 1e-4: says which may win."""
    return _about(_word(seed, position, token))


@triton.jit
def gumbel_at(seed, position, token):
    """The noise of single tokens, as `philox.gumbel_noise` defines it."""
    u = _uniform(_word(seed, position, token)).to(tl.float64)
    # log(1 - u) loses the digits of a small u; four terms of the series are exact below 1e-4.
    exponential = tl.where(u < 1e-4, u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25))), -tl.log(1.0 - u))
    return (-tl.log(exponential)).to(tl.float32)


@triton.jit
def noisy_bound(x, fours, seed, position):
    """``x`` plus its noise to within 1e-4, without fp64: says which groups may hold the winner."""
    counter = fours.to(tl.uint32)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero)
    return x + _about(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), x.shape))
