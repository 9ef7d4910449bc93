"""Remembered chains are the chains, whatever was asked before, and memory stays within its bound."""

from __future__ import annotations

import random
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.chain_cache import STRIDE, ChainCache
from katydid_runtime.block_hash import BLOCK_TOKENS, ChainKey, hash_chain, pack_ids

DICE = random.Random(0)
LONG = [DICE.randrange(2**31) for _ in range(3 * STRIDE * BLOCK_TOKENS + 777)]
KEYS = [ChainKey(b"m"), ChainKey(b"m", salt=b"s" * 32, public_blocks=70), ChainKey(b"m", adapter="a"), ChainKey(b"n")]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, len(LONG)), st.integers(0, len(LONG)), st.sampled_from(KEYS)), max_size=6))
def test_it_is_the_chain(asked: list[tuple[int, int, ChainKey]]) -> None:
    cache = ChainCache(1 << 20)
    for length, changed, key in asked:
        ids = LONG[:length]
        if changed < length:
            ids[changed] ^= 1
        packed = pack_ids(array("I", ids))
        plain = hash_chain(
            packed, identity=b"n" if key is KEYS[3] else b"m", adapter=key.adapter, salt=key.salt,
            public_blocks=key.public_blocks,
        )  # fmt: skip
        assert b"".join(cache.chain(packed, key)) == plain


def test_memory_is_bounded() -> None:
    cache = ChainCache(10_000)
    for first in range(20):
        packed = pack_ids(array("I", [first, *LONG]))
        assert b"".join(cache.chain(packed, KEYS[0])) == hash_chain(packed, identity=b"m")
        assert 0 < cache.size_bytes <= 10_000
    packed = pack_ids(array("I", LONG))
    assert b"".join(ChainCache(0).chain(packed, KEYS[0])) == KEYS[0].extend(packed)
