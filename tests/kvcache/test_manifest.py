"""Manifests of packs: what is written is read, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kvcache.shared.manifest import Entry, Location, Manifest, manifest_bytes
from katydid_runtime.errors import DataCorruptError

from tests.kvcache.running import IDENTITY, LAYOUT

digests = st.binary(min_size=32, max_size=32).filter(any)
ids = st.one_of(st.just(b""), st.binary(min_size=16, max_size=16).filter(any))
entries = st.builds(
    Entry,
    name=digests,
    parent=st.one_of(st.just(b""), digests),
    tenant=ids,
    expires_at=st.floats(0, 1e12),
    sliding_s=st.floats(0, 1e9),
    location=st.builds(
        Location,
        object=st.just("a.pack"),
        offset=st.integers(0, 2**63),
        checksum=st.binary(min_size=16, max_size=16),
        linear=st.integers(0, 2**64 - 1),
    ),
)


@settings(max_examples=50)
@given(st.lists(entries, max_size=5))
def test_round_trip(rows: list[Entry]) -> None:
    data = Manifest(IDENTITY, LAYOUT, rows).encode()
    assert len(data) == manifest_bytes(len(rows))
    assert Manifest.decode(data, "a.pack") == Manifest(IDENTITY, LAYOUT, rows)


def test_without_payloads_behind_it_nothing_has_a_place() -> None:
    entry = Entry(b"n" * 32, b"", b"", 0.0, 0.0, None)
    data = Manifest(IDENTITY, LAYOUT, [entry]).encode()
    assert Manifest.decode(data, "a.gone", withdrawn=True).entries == [entry]


@settings(max_examples=50)
@given(st.lists(entries, min_size=1, max_size=3), st.data())
def test_a_flipped_or_cut_manifest_is_none(rows: list[Entry], data: st.DataObject) -> None:
    whole = bytearray(Manifest(IDENTITY, LAYOUT, rows).encode())
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DataCorruptError):
        Manifest.decode(bytes(whole[:cut]), "a.pack")
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DataCorruptError):
        Manifest.decode(bytes(whole), "a.pack")
