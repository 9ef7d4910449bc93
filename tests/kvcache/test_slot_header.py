"""Slot headers: what is written is read, and nothing else is taken for a header."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from katydid_cache.layout import DTYPE_BYTES, BlockLayout
from katydid_kvcache.disk.slot_header import HEADER_BYTES, SlotHeader

digests = st.binary(min_size=32, max_size=32)
layouts = st.builds(
    BlockLayout,
    layers=st.integers(1, 200),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 512),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)
headers = st.builds(
    SlotHeader,
    identity=digests,
    hash=digests,
    parent=st.one_of(st.just(b""), digests.filter(any)),
    generation=st.integers(0, 2**64 - 1),
    checksum=st.binary(min_size=16, max_size=16),
    expires_at=st.floats(0, 1e12),
    tenant=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16).filter(any)),
    sliding_s=st.floats(0, 1e9),
    layout=layouts,
)
EXAMPLE = SlotHeader(
    b"i" * 32, b"h" * 32, b"", 7, b"c" * 16, 0.0, BlockLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")
)


@given(headers)
def test_round_trip(header: SlotHeader) -> None:
    page = header.encode()
    assert len(page) == HEADER_BYTES
    assert SlotHeader.decode(page) == header


@given(headers, st.integers(0, 304 * 8 - 1))
@example(EXAMPLE, 0)
def test_any_flipped_bit_of_the_fields_is_noticed(header: SlotHeader, bit: int) -> None:
    page = bytearray(header.encode())
    page[bit // 8] ^= 1 << (bit % 8)
    decoded = SlotHeader.decode(bytes(page))
    # Behind the fields there is only padding.
    assert decoded is None or (decoded == header and bit // 8 >= len(header.encode().rstrip(b"\0")))


@given(headers, headers, st.integers(1, 250))
def test_a_torn_header_is_no_header(old: SlotHeader, new: SlotHeader, at: int) -> None:
    torn = new.encode()[:at] + old.encode()[at:]
    assert SlotHeader.decode(torn) in (None, old, new)


@given(st.binary(max_size=HEADER_BYTES))
@example(b"")
def test_noise_is_no_header(noise: bytes) -> None:
    assert SlotHeader.decode(noise) is None
