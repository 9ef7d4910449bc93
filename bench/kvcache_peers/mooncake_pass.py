"""The pass of `kvcache_pass.py` through Mooncake's dummy client: `python mooncake_pass.py HOST:PORT` of a real client.

Zero-copy calls of 8 blocks from and to the client's own shared memory, as engines use it.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time

import numpy as np
from mooncake.store import MooncakeDistributedStore

BLOCKS, BATCH, BLOCK_BYTES = 128, 8, 2 << 20


def main() -> None:
    store = MooncakeDistributedStore()
    if store.setup_dummy(1 << 30, 256 << 20, sys.argv[1]):
        raise SystemExit("no real client")
    size = BLOCKS * BLOCK_BYTES
    base = store.alloc_from_mem_pool(size)
    store.register_buffer(base, size)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
    payload = np.frombuffer(os.urandom(size), dtype=np.uint8)
    places = [base + index * BLOCK_BYTES for index in range(BLOCKS)]
    print("ready", flush=True)
    for _ in sys.stdin:
        puts, gets = [], []
        for _ in range(3):
            keys = [os.urandom(16).hex() for _ in range(BLOCKS)]
            memory[:] = payload
            started = time.perf_counter()
            for first in range(0, BLOCKS, BATCH):
                part = slice(first, first + BATCH)
                if any(store.batch_put_from(keys[part], places[part], [BLOCK_BYTES] * BATCH)):
                    raise SystemExit("not stored")
            puts.append(time.perf_counter() - started)
            memory[:] = 0
            started = time.perf_counter()
            for first in range(0, BLOCKS, BATCH):
                part = slice(first, first + BATCH)
                store.batch_get_into(keys[part], places[part], [BLOCK_BYTES] * BATCH)
            gets.append(time.perf_counter() - started)
            if not np.array_equal(memory, payload):
                raise SystemExit("what came back is not what was put")
            for key in keys:
                store.remove(key, True)
        result = {"put": size / 1e9 / statistics.median(puts), "get": size / 1e9 / statistics.median(gets)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
