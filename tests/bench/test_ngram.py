"""The n-gram baseline against the same formulas written with dictionaries."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.quality.ngram import ByteNgram, Smoothing


def by_dictionary(train: bytes, test: bytes, order: int, smoothing: Smoothing) -> float:
    # Counts of shorter grams are sums over the longest ones, as a prefix table gives them.
    longest = [train[i : i + order] for i in range(len(train) - order + 1)]
    counts = [Counter(g[:n] for g in longest) for n in range(order + 1)]
    bits = 0.0
    for i in range(len(test)):
        p = 1 / 256
        for n in range(1, order + 1):
            if i + 1 < n:
                break
            gram = test[i + 1 - n : i + 1]
            context = counts[n - 1][gram[:-1]]
            distinct = sum(1 for g in counts[n] if g[:-1] == gram[:-1])
            if not context:
                continue
            seen = counts[n][gram]
            if smoothing == "witten-bell":
                p = (seen + distinct * p) / (context + distinct)
            else:
                once = sum(1 for c in counts[n].values() if c == 1)
                twice = sum(1 for c in counts[n].values() if c == 2)
                discount = once / (once + 2 * twice) if once else 0.5
                p = (max(seen - discount, 0) + discount * distinct * p) / context
        bits -= math.log2(p)
    return bits / len(test)


texts = st.binary(min_size=12, max_size=60).map(lambda b: bytes(x % 5 + 97 for x in b))


@pytest.mark.parametrize("smoothing", ["witten-bell", "absolute-discounting"])
@given(train=texts, test=texts)
def test_bits_equal_the_dictionary_form(train: bytes, test: bytes, smoothing: Smoothing) -> None:
    for order in (1, 3, 5):
        ours = ByteNgram(train, order).bits_per_byte(test, smoothing)
        assert ours == pytest.approx(by_dictionary(train, test, order, smoothing))


def test_probabilities_of_all_next_bytes_sum_to_one() -> None:
    model = ByteNgram(b"abracadabra abracadabra", 3)
    for smoothing in ("witten-bell", "absolute-discounting"):
        total = sum(
            2 ** (-4 * model.bits_per_byte(b"abr" + bytes([x]), smoothing) + 3 * model.bits_per_byte(b"abr", smoothing))
            for x in range(256)
        )
        assert total == pytest.approx(1)


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="text has 3 bytes, at least 5 are needed"):
        ByteNgram(b"abc")
