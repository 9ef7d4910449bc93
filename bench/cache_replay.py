"""Hit rates of the cache's policies on a trace of requests, by the store that the service runs.

    python bench/cache_replay.py TRACE.jsonl [--output bench/results/cache_replay.json] [--default-only]

The trace has one JSON object a line with `hash_ids` (one id for each block of the input, equal ids for equal prefixes)
and `input_length` in tokens, as those published by the Mooncake project. Every request looks its blocks up and writes
those that were missing, in order. The memory tier holds 1, 3, 10 and 30 % of the trace's distinct blocks; the hit rate
is the share of all input tokens that were found as a prefix. Exits with 1 when the default policy misses a bar.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from katydid_cache.layout import BlockLayout, Span
from katydid_kvcache.policy.admission import ADMISSIONS
from katydid_kvcache.policy.eviction import EVICTIONS
from katydid_kvcache.policy.pools import TierPolicy
from katydid_kvcache.slabs import SlabAllocator
from katydid_kvcache.store import Store, Write

SHARES = (0.01, 0.03, 0.10, 0.30)
BARS = {"conversation_trace": (0.1090, 0.1791, 0.2844, 0.3648)}
"""Hit rates to reach with the default policy, by the name of the trace: the best published for LRU, at each size."""

DEFAULT = TierPolicy()
# The smallest block there is: one page, so that a slab of N pages is a tier of N blocks.
LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=32, dtype="float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class Request:
    """A request's input: `names` of its blocks, as the 32-byte hashes of a chain, and its length in tokens."""

    names: Sequence[bytes]
    tokens: int


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace, in order."""
    requests = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            requests.append(Request([int(name).to_bytes(32, "big") for name in row["hash_ids"]], row["input_length"]))
    return requests


def replay(requests: Sequence[Request], blocks: int, policy: TierPolicy) -> float:
    """Share of the input tokens found by a memory tier of so many blocks."""
    block_tokens = max(-(-request.tokens // len(request.names)) for request in requests)
    store = Store(
        SlabAllocator(1, blocks * LAYOUT.block_bytes), None, memory_policy=policy, changed=lambda _: None, now=time.time
    )
    space = store.namespace(bytes(32), LAYOUT)
    hits = 0
    for request in requests:
        found = store.prefix(space, request.names, space.all_heads).blocks
        store.touch(found)
        store.memory.ghosts.observe(request.names, space.slot_bytes)
        hits += min(len(found) * block_tokens, request.tokens)
        parent = request.names[len(found) - 1] if found else b""
        for name in request.names[len(found) :]:
            begun = store.begin_write(space, name, parent, Span())
            if isinstance(begun, Write):
                store.finish_write(begun, b"")
                store.complete(begun, b"replayed", 0.0)
                store.unpin([begun.block])
            parent = name
        store.settle(space, request.names[-1])
    return hits / sum(request.tokens for request in requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--default-only", action="store_true", help="only the default policy, against its bars")
    options = parser.parse_args()
    requests = read_trace(options.trace)
    distinct = len({name for request in requests for name in request.names})
    bars = BARS.get(options.trace.stem, (None,) * len(SHARES))
    rows = []
    for eviction in EVICTIONS:
        for admission in ADMISSIONS:
            policy = TierPolicy(eviction, admission)
            if options.default_only and policy != DEFAULT:
                continue
            for share, bar in zip(SHARES, bars, strict=True):
                rate = round(replay(requests, int(distinct * share), policy), 4)
                held = bar if policy == DEFAULT else None
                rows.append(
                    {
                        "figure": f"replay.{eviction}.{admission}.{share:.0%}",
                        "value": rate,
                        "unit": "share of input tokens",
                        "floor": None,
                        "peer": None,
                        "peer_value": None,
                        "bar": held,
                        "met": None if held is None else rate >= held,
                    }
                )
            print(f"{eviction:7} {admission:13}", *(f"{row['value']:.4f}" for row in rows[-len(SHARES) :]), flush=True)
    if options.output is not None:
        command = f"python bench/cache_replay.py {options.trace.name}"
        result = {"command": command, "requests": len(requests), "distinct_blocks": distinct, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["met"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
