"""Time to the first token of a prompt that is computed, and of one that the cache service has: real processes.

    PYTHONPATH=. python bench/kvcache_ttft.py --device cuda       # 32K tokens of a model with 112 KiB of KV a token

The model has random weights and a decoder of 0.4 B parameters (28 layers, 8 KV heads of 128). A prompt is computed, and
written to the service; then the engine's own blocks are dropped and the same prompt is asked again, which finds all but
its last tokens in the service's memory. Medians of `--rounds` rounds with a prompt of their own. Answers are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engine import engine_process
from tests.engine.engine_process import Answer, Service, SessionClient, engine, session
from tests.engine.test_engine_kvcache import attached, blocks_held, flush
from tests.tiny_model import write_tiny_model

DENSE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "torch_dtype": "bfloat16",
}
"""A decoder with 112 KiB of KV a token in bf16."""
SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
BLOCK_TOKENS = 64

Row = dict[str, Any]


async def asked(client: SessionClient, ids: list[int]) -> tuple[Answer, float]:
    """The answer, and seconds to its first token."""
    started = time.perf_counter()
    answer = client.submit(ids, max_tokens=4, ignore_eos=True)
    while answer.first is None:  # noqa: ASYNC110 - the session has no event for it
        await asyncio.sleep(0.0002)
    first_s = time.perf_counter() - started
    await answer.done.wait()
    return answer, first_s


async def rounds(address: str, cache: str, tokens: int, count: int) -> list[tuple[float, float, bool, int]]:
    """Of each: seconds computed and fetched, whether the answers agree, and how many tokens were found."""
    result, blocks = [], 0
    async with session(address) as client:
        await attached(client, True)
        for number in range(count + 1):
            chooser = random.Random(number)
            ids = [chooser.randrange(250) for _ in range(tokens)]
            made, computed_s = await asked(client, ids)
            blocks += (tokens - 1) // BLOCK_TOKENS
            await blocks_held([cache], blocks)
            await flush(address)
            found, fetched_s = await asked(client, ids)
            result.append((computed_s, fetched_s, made.output == found.output, found.cached()[1]))
            print(f"{tokens} tokens: computed {computed_s:.4f} s, fetched {fetched_s:.4f} s", flush=True)
            print("  ", [(p.name, round(p.duration.ToMicroseconds() / 1e3, 1)) for p in found.first.trace.phases])  # type: ignore[union-attr]
    return result[1:]


def rows(device: str, tokens: int, count: int, options: list[str], model: Path | None) -> list[Row]:
    engine_process.START_TIMEOUT_S = 300.0
    shape = DENSE if device == "cuda" else DENSE | SMALL
    token_bytes = shape["num_hidden_layers"] * shape["num_key_value_heads"] * 2 * shape["head_dim"] * 2
    pages = tokens // BLOCK_TOKENS + 40
    memory = (count + 1) * tokens * token_bytes * 11 // 10 + (256 << 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model or folder / "model"
        if not model.exists():
            write_tiny_model(model, **shape)
        address = f"unix:{folder}/cache.sock"
        cache = Service("katydid_kvcache", folder / "cache.log", "--listen", address, "--memory-bytes", str(memory))
        words = [
            "--device",
            device,
            "--kvcache-address",
            address,
            "--kvcache-fetch",
            "always",
            "--kv-pages",
            str(pages),
        ]
        words += ["--max-sequences", "4", "--max-batch-tokens", "8192", "--max-model-tokens", str(tokens + 64)]
        try:
            assert cache.address
            with engine(model, folder, *words, *options) as served:
                measured = asyncio.run(rounds(served.address, address, tokens, count))
        finally:
            cache.stop()
    computed = statistics.median(row[0] for row in measured)
    fetched = statistics.median(row[1] for row in measured)
    told = {"tokens": tokens, "gigabytes": round(tokens * token_bytes / 1e9, 3), "rounds": count}
    told |= {"answers_agree": sum(row[2] for row in measured), "tokens_found": measured[0][3]}
    return [
        {"figure": f"{tokens} tokens computed: TTFT", "value": round(computed, 4), "unit": "s"} | told,
        {"figure": f"{tokens} tokens from the service's memory: TTFT", "value": round(fetched, 4), "unit": "s"}
        | told
        | {"bytes_over_ttft_gb_s": round(tokens * token_bytes / fetched / 1e9, 2)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, default=32778)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", type=Path, help="where the model is, or is to be kept")
    parser.add_argument("options", nargs="*", help="of the engine")
    options = parser.parse_args()
    measured = rows(options.device, options.tokens, options.rounds, options.options, options.model)
    for row in measured:
        print(json.dumps(row), flush=True)
    if options.output is not None:
        content = {"load": os.getloadavg()[0], "rows": measured}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
