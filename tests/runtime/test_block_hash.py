"""The block hash chain against its published vectors and an independent implementation."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_runtime.block_hash import (
    BLOCK_TOKENS,
    ChainKey,
    fingerprint,
    hash_chain,
    pack_ids,
    split_hashes,
    unpack_ids,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "block-hash.md"
IDENTITY = bytes(range(32))

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=4 * BLOCK_TOKENS)


def oracle(ids: list[int], identity: bytes, adapter: str, salt: bytes, public_blocks: int) -> list[bytes]:
    """The formula written down a second time, one update a field."""
    digest = _sha(b"katydid.root.v1", identity, adapter.encode())
    hashes = []
    for block in range(len(ids) // 64):
        packed = struct.pack("<64I", *ids[64 * block : 64 * block + 64])
        digest = _sha(b"katydid.block.v1", digest, b"" if block < public_blocks else salt, packed)
        hashes.append(digest)
    return hashes


def _sha(*fields: bytes) -> bytes:
    hasher = hashlib.sha256()
    for content in fields:
        hasher.update(struct.pack("<I", len(content)))
        hasher.update(content)
    return hasher.digest()


def vectors() -> list[dict[str, object]]:
    block = re.search(r"```json\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert block is not None
    return json.loads(block[1])


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector["case"])
def test_published_vectors(vector):
    first, count, step = vector["ids"]
    ids = array("I", [first + step * i for i in range(count)])
    chain = hash_chain(
        ids,
        identity=IDENTITY,
        adapter=vector["adapter"],
        salt=vector["salt"].encode(),
        public_blocks=vector["public_blocks"],
    )
    assert [chain[i : i + 32].hex() for i in range(0, len(chain), 32)] == vector["hashes"]


def test_published_fingerprint():
    assert f"`{fingerprint(IDENTITY).hex()}`" in DOCUMENT.read_text()
    assert fingerprint(IDENTITY) != fingerprint(bytes(32))


@given(token_ids, st.binary(min_size=1), st.text(max_size=8), st.binary(max_size=40), st.integers(0, 5))
def test_equals_the_formula(ids, identity, adapter, salt, public_blocks):
    chain = hash_chain(array("I", ids), identity=identity, adapter=adapter, salt=salt, public_blocks=public_blocks)
    assert chain == b"".join(oracle(ids, identity, adapter, salt, public_blocks))


@given(token_ids, st.integers(0, 4), st.integers(0, 5))
def test_extension_continues_the_chain(ids, cut, public_blocks):
    key = ChainKey(IDENTITY, "a", b"salt", public_blocks)
    whole = key.extend(array("I", ids))
    cut = min(cut, len(ids) // BLOCK_TOKENS)
    head = key.extend(array("I", ids[: cut * BLOCK_TOKENS]))
    tail = key.extend(array("I", ids[cut * BLOCK_TOKENS :]), first_block=cut, previous=head[-32:])
    assert head + tail == whole


def test_every_part_of_the_key_matters():
    ids = array("I", range(128))
    base = {"identity": IDENTITY, "adapter": "a", "salt": b"s", "public_blocks": 1}
    changes = ({"identity": bytes(32)}, {"adapter": "b"}, {"salt": b"t"}, {"public_blocks": 0})
    chains = {hash_chain(ids, **(base | change))[-32:] for change in ({}, *changes)}
    assert len(chains) == 5
    # A byte cannot wander from one field into the next.
    assert hash_chain(ids, identity=b"ab", adapter="c") != hash_chain(ids, identity=b"a", adapter="bc")


def test_public_blocks_are_shared_between_tenants():
    ids = array("I", range(192))
    one = hash_chain(ids, identity=IDENTITY, salt=b"one", public_blocks=2)
    two = hash_chain(ids, identity=IDENTITY, salt=b"two", public_blocks=2)
    assert one[:64] == two[:64]
    assert one[64:] != two[64:]


def test_all_buffer_forms_agree():
    native = array("I", range(64))
    packed = struct.pack("<64I", *range(64))
    forms = [native, memoryview(native), packed, bytearray(packed), memoryview(packed)]
    assert len({hash_chain(form, identity=IDENTITY) for form in forms}) == 1


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [(array("q", [1]), "8 bytes an item"), (b"12345", "no whole number"), (array("H", [1]), "2 bytes an item")],
)
def test_refuses_what_are_no_ids(ids, complaint):
    with pytest.raises(ValueError, match=complaint):
        pack_ids(ids)


@given(token_ids)
def test_ids_unpack_to_what_was_packed(ids):
    packed = struct.pack(f"<{len(ids)}I", *ids)
    assert pack_ids(array("I", ids)) == packed
    assert unpack_ids(packed).tolist() == ids


def test_unpacking_refuses_part_of_an_id():
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"12345")


def test_hashes_split_in_order():
    chain = hash_chain(array("I", range(192)), identity=IDENTITY)
    assert split_hashes(chain) == [chain[:32], chain[32:64], chain[64:]]
    assert split_hashes(b"") == []


def test_refuses_a_key_that_names_nothing():
    with pytest.raises(ValueError, match="identity"):
        ChainKey(b"")
    with pytest.raises(ValueError, match="public_blocks"):
        ChainKey(IDENTITY, public_blocks=-1)


@pytest.mark.parametrize(("first_block", "previous"), [(0, bytes(32)), (1, b""), (1, bytes(31))])
def test_refuses_a_previous_hash_that_does_not_fit(first_block, previous):
    with pytest.raises(ValueError, match="first_block"):
        ChainKey(IDENTITY).extend(b"", first_block=first_block, previous=previous)
