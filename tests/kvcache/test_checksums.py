"""A checksum over pieces is the checksum of the pieces in a row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from katydid_kvcache.checksums import CHECKSUM_BYTES, payload_checksum
from xxhash import xxh3_128_digest


@given(st.binary(min_size=1, max_size=500), st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1))
def test_pieces(block: bytes, bounds: list[tuple[int, int]]) -> None:
    runs = [range(min(pair), max(pair)) for pair in bounds]
    joined = b"".join(block[run.start : run.stop] for run in runs)
    checksum = payload_checksum(memoryview(block), runs)
    assert checksum == xxh3_128_digest(joined)
    assert len(checksum) == CHECKSUM_BYTES
