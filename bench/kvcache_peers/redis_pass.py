"""The pass of `kvcache_pass.py` through Redis over a Unix socket: `python redis_pass.py SOCKET`; needs redis, hiredis.

Puts as a pipeline of 8 SETs, gets as MGET of 8 and one by one, of which the faster counts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import redis

BLOCKS, BATCH, BLOCK_BYTES = 128, 8, 2 << 20


def main() -> None:
    server = redis.Redis(unix_socket_path=sys.argv[1])
    payloads = [os.urandom(BLOCK_BYTES) for _ in range(BLOCKS)]
    print("ready", flush=True)
    gigabytes = BLOCKS * BLOCK_BYTES / 1e9
    for _ in sys.stdin:
        puts, gets = [], []
        for _ in range(3):
            keys = [os.urandom(32) for _ in range(BLOCKS)]
            started = time.perf_counter()
            for first in range(0, BLOCKS, BATCH):
                pipe = server.pipeline(transaction=False)
                for index in range(first, first + BATCH):
                    pipe.set(keys[index], payloads[index])
                pipe.execute()
            puts.append(time.perf_counter() - started)
            started = time.perf_counter()
            many = [server.mget(keys[first : first + BATCH]) for first in range(0, BLOCKS, BATCH)]
            together = time.perf_counter() - started
            if [value for values in many for value in values] != payloads:
                raise SystemExit("what came back is not what was put")
            del many
            started = time.perf_counter()
            for key in keys:
                server.get(key)
            gets.append(min(together, time.perf_counter() - started))
            server.delete(*keys)
        print(json.dumps({"put": gigabytes / statistics.median(puts), "get": gigabytes / statistics.median(gets)}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
