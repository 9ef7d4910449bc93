"""A worker group seen from the face, with the worker's end of the channel in the test's hands."""

from __future__ import annotations

import asyncio
import socket

import pytest
from katydid_engine.channel import BlockingChannel, FaceChannel
from katydid_engine.faults import FaultDelays
from katydid_engine.messages import Load, StepReport
from katydid_engine.parallel import ParallelPlan
from katydid_engine.worker_config import WorkerConfig
from katydid_engine.worker_group import WorkerGroup
from katydid_runtime.errors import EngineLostError, InternalError, KatydidError

CONFIG = WorkerConfig(
    started_at=0.0,
    folder="",
    device="cpu",
    dtype="float32",
    quantization="auto",
    kv_cache_dtype="auto",
    plan=ParallelPlan(),
    rank=0,
    member=0,
    members=1,
    dp_rank=3,
    rendezvous="",
    rank_timeout_s=10.0,
    micro_batches=1,
    rebalance_passes=2000,
    threads=1,
    mtp="auto",
    async_scheduling="auto",
    cuda_graphs="on",
    tpot_target_s=None,
    ttft_target_s=None,
    num_pages=1,
    kv_memory_bytes=0,
    gpu_memory_share=0.9,
    max_model_tokens=64,
    max_batch_tokens=64,
    max_sequences=1,
    log_level="info",
    faults=FaultDelays(),
)


def failure_after(*reports: StepReport, defect: Exception | None) -> tuple[KatydidError, list[StepReport]]:
    """How a group fails whose worker sends ``reports`` and ends, and whose face raises ``defect`` at each."""
    taken: list[StepReport] = []

    def take(report: StepReport) -> None:
        taken.append(report)
        if defect is not None:
            raise defect

    async def body() -> KatydidError:
        ours, theirs = socket.socketpair()
        worker = BlockingChannel(theirs.detach())
        group = WorkerGroup(CONFIG)
        group.on_report = take
        channel = await FaceChannel.open(ours)
        reader = asyncio.create_task(group._read(channel, 0))
        for report in reports:
            worker.send(report)
        worker.close()
        try:
            return await asyncio.wait_for(asyncio.shield(group.failure), 5)
        finally:
            await reader
            channel.close()

    return asyncio.run(body()), taken


def test_a_worker_that_ends_is_a_lost_engine() -> None:
    error, taken = failure_after(StepReport(Load(running=1)), StepReport(Load()), defect=None)
    assert isinstance(error, EngineLostError)
    assert "worker 3.0" in error.message
    assert [report.load.running for report in taken] == [1, 0]


def test_a_defect_in_the_face_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    error, taken = failure_after(StepReport(Load()), StepReport(Load()), defect=RuntimeError("books are wrong"))
    assert isinstance(error, InternalError)
    assert error.error_id is not None
    assert error.error_id in caplog.text
    assert "books are wrong" in caplog.text
    assert len(taken) == 1
