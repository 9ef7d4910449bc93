"""Engines over quantised weights and pages: what they answer and who they say they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import EngineServiceStub
from katydid_engine.quantize import Options, quantize_folder

from tests.engine.engine_process import Answer, engine, session
from tests.engine.test_engine_process import prompt, run
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e
FP8 = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")


def test_a_quantised_folder_and_a_quantising_engine(tmp_path: Path) -> None:
    """The same tokens, also out of fp8 pages that another request filled; an identity for each way to make pages."""
    plain = write_tiny_model(tmp_path / "plain", "hy_v3")
    quantize_folder(plain, tmp_path / "fp8", Options("w8a8"))
    answers: list[Answer] = []
    identities: set[bytes] = set()

    async def ask(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            described = await EngineServiceStub(channel).Describe(pb.DescribeRequest())
            identities.add(described.identity)
            assert described.block_bytes == 2 * 2 * 2 * 64 * 16 * (1 if answers else 4)
        async with session(address) as client:
            first = await client.generate(prompt(130), max_tokens=12, ignore_eos=True, logprobs=0)
            again = await client.generate(prompt(130), max_tokens=12, ignore_eos=True)
            assert again.cached()[0] == 128
            assert again.output == first.output
            answers.append(first)

    with (
        engine(plain, tmp_path, "--kv-pages", "16") as exact,
        engine(plain, tmp_path, "--kv-pages", "16", *FP8) as quantising,
        engine(tmp_path / "fp8", tmp_path, "--kv-pages", "16", "--kv-cache-dtype", "fp8") as stored,
    ):
        for service in (exact, quantising, stored):
            run(ask(service.address))
    exact_answer, quantising_answer, stored_answer = answers
    assert stored_answer.output == quantising_answer.output
    assert stored_answer.chosen[0] == quantising_answer.chosen[0]
    assert stored_answer.chosen[0] != exact_answer.chosen[0]
    assert stored_answer.chosen[0][0] == pytest.approx(exact_answer.chosen[0][0], abs=1.0)
    assert len(identities) == 3


def test_another_scheme_than_the_folders(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", "hy_v3")
    quantize_folder(plain, tmp_path / "w4a8", Options("w4a8"))
    words = ["--listen", "127.0.0.1:0", "--model", str(tmp_path / "w4a8"), "--quantization", "fp8"]
    done = subprocess.run(
        [sys.executable, "-m", "katydid_engine", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "quantization is 'fp8', but the checkpoint is stored as w4a8" in done.stderr
