"""Time of the block hash chain by prompt length: it lies on the path of every request, in gateway and engine alike."""

from __future__ import annotations

import statistics
import time
from array import array

from katydid_runtime.block_hash import ChainKey

REPEATS = 50


def main() -> None:
    key = ChainKey(bytes(32), salt=bytes(32), public_blocks=16)
    print("tokens  median ms  best ms")
    for tokens in (1024, 8192, 65536, 131072, 262144):
        ids = array("I", range(tokens)).tobytes()
        milliseconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            key.extend(ids)
            milliseconds.append((time.perf_counter() - start) * 1e3)
        print(f"{tokens:6}  {statistics.median(milliseconds):9.3f}  {min(milliseconds):7.3f}")


if __name__ == "__main__":
    main()
