"""An engine on a GPU says the same with its steps as graphs, ahead of their time and with drafts, as op by op."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.engine import engine_process
from tests.engine.engine_process import Answer, engine, session
from tests.engine.test_engine_kvcache_gpu import MODEL, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

OPTIONS = ("--device", "cuda", "--kv-pages", "600", "--max-batch-tokens", "4096", "--max-sequences", "8")
SPARSE = ("--sparse-prefill", "stem:budget=0.5,dense_layers=1,min_tokens=2000")
OP_BY_OP = ("--cuda-graphs", "off", "--mtp", "0", "--async-scheduling", "off")


def said(folder: Path, *options: str) -> list[list[int]]:
    """Of streams, of long prompts that come beside them, sparse and dense, and of short and longer ones alone."""
    with engine(MODEL, folder, *OPTIONS, *SPARSE, *options) as service:
        assert service.address

        async def scenario() -> list[list[int]]:
            async with session(service.address) as client:
                fields = {"ignore_eos": True}
                streams = [client.submit(prompt(150 + 70 * n, n), max_tokens=400, **fields) for n in range(4)]
                while any(stream.first is None for stream in streams):
                    await asyncio.sleep(0.002)
                late: list[Answer] = [
                    await client.generate(prompt(length, 10), max_tokens=6, allow_sparse_prefill=sparse, **fields)
                    for length, sparse in ((5000, True), (4000, False), (300, True))
                ]
                for stream in streams:
                    await asyncio.wait_for(stream.done.wait(), 60)
                alone = [
                    await client.generate(prompt(length, 11), max_tokens=6, allow_sparse_prefill=True, **fields)
                    for length in (40, 200, 900, 3000, 3100)
                ]
                return [answer.output for answer in (*streams, *late, *alone)]

        return asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.timeout(400)
def test_graphs_drafts_and_steps_ahead_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "START_TIMEOUT_S", 300.0)  # kernels are compiled
    (tmp_path / "graphs").mkdir()
    (tmp_path / "plain").mkdir()
    found, expected = said(tmp_path / "graphs", "--mtp", "auto"), said(tmp_path / "plain", *OP_BY_OP)
    assert [len(one) for one in found] == [400] * 4 + [6] * 8
    # Texts that repeat themselves leave no doubt for a while; in the end a stream may find another way on.
    agreed = [
        next((at for at, (a, b) in enumerate(zip(*two, strict=True)) if a != b), len(two[0]))
        for two in zip(found, expected, strict=True)
    ]
    print("tokens that agree:", agreed)
    assert all(at >= min(len(one), 32) for at, one in zip(agreed, found, strict=True))
