"""The replay of traces against a plain list that is an LRU cache, on a trace small enough to follow by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from katydid_kvcache.policy.pools import TierPolicy

from bench.cache_replay import Request, read_trace, replay

BLOCK_TOKENS = 8


def conversations(seed: int, count: int) -> list[Request]:
    """Chains that grow, between others that never come back; the last block of an input may be partly filled."""
    dice = random.Random(seed)
    chains: list[list[int]] = []
    requests, fresh = [], iter(range(10**6))
    for _ in range(count):
        if chains and dice.random() < 0.6:
            chain = dice.choice(chains)
        else:
            chain = []
            chains.append(chain)
        chain += [next(fresh) for _ in range(dice.randint(1, 4))]
        tokens = len(chain) * BLOCK_TOKENS - dice.randrange(BLOCK_TOKENS)
        requests.append(Request([name.to_bytes(32, "big") for name in chain], tokens))
    return requests


def plain_lru(requests: list[Request], blocks: int) -> float:
    cache: list[bytes] = []
    hits = 0
    for request in requests:
        prefix = next((at for at, name in enumerate(request.names) if name not in cache), len(request.names))
        hits += min(prefix * BLOCK_TOKENS, request.tokens)
        # Used from the end on, so that the end of a chain is the first to go.
        for name in reversed(request.names):
            if name in cache:
                cache.remove(name)
            cache.append(name)
        del cache[: max(0, len(cache) - blocks)]
    return hits / sum(request.tokens for request in requests)


def test_lru_that_admits_all_is_an_lru_list() -> None:
    requests = conversations(3, 300)
    for blocks in (20, 60, 10_000):
        found = replay(requests, blocks, TierPolicy("lru", "all"))
        assert found == pytest.approx(plain_lru(requests, blocks), abs=0.01)
    assert found > 0.5


def test_a_small_tier_keeps_what_comes_back_from_a_stream_of_strangers() -> None:
    known = [[(10**7 + 10 * chain + at).to_bytes(32, "big") for at in range(5)] for chain in range(4)]
    requests = []
    for number in range(400):
        names = (
            known[number // 4 % 4] if number % 4 == 0 else [(8 * number + at).to_bytes(32, "big") for at in range(8)]
        )
        requests.append(Request(names, len(names) * BLOCK_TOKENS))
    every, second = (replay(requests, 30, TierPolicy("lru", rule)) for rule in ("all", "second_touch"))
    assert every < 0.01
    assert second > 0.15
    assert replay(requests, 30, TierPolicy()) > 0.8 * second


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}) + "\n")
    assert read_trace(path) == [Request([(4).to_bytes(32, "big"), (9).to_bytes(32, "big")], 700)]
