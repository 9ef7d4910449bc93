"""A checksum over pieces is that of the pieces in a row; the linear one is what the kernels make."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kernels import linear_checksum as checksum_of_kernels
from katydid_kernels import published_checksum
from katydid_kvcache.checksums import CHECKSUM_BYTES, linear_checksum, payload_checksum
from xxhash import xxh3_128_digest


@given(st.binary(min_size=1, max_size=500), st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1))
def test_pieces(block: bytes, bounds: list[tuple[int, int]]) -> None:
    runs = [range(min(pair), max(pair)) for pair in bounds]
    joined = b"".join(block[run.start : run.stop] for run in runs)
    checksum = payload_checksum(memoryview(block), runs)
    assert checksum == xxh3_128_digest(joined)
    assert len(checksum) == CHECKSUM_BYTES


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200_000), st.integers(0, 2**32))
def test_the_linear_checksum_is_that_of_the_kernels(words: int, seed: int) -> None:
    block = random.Random(seed).randbytes(4 * words)
    assert linear_checksum(memoryview(block)) == published_checksum(checksum_of_kernels(block))


def test_no_block_has_the_linear_checksum_that_stands_for_none() -> None:
    assert linear_checksum(memoryview(bytes(4096))) == 2**64 - 1
