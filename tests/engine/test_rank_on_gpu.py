"""A worker process on a GPU, as the face starts it: it measures, captures, counts its pages, and answers."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from katydid_engine.channel import BlockingChannel
from katydid_engine.faults import FaultDelays
from katydid_engine.loader import load_model
from katydid_engine.messages import Failed, Ready, StepReport, Stop, Submit
from katydid_engine.parallel import ParallelPlan
from katydid_engine.request import Request, Sampling
from katydid_engine.worker_config import WorkerConfig
from katydid_runtime.block_hash import ChainKey

from tests.engine.test_decode_steps import TINY, flips, prompts

pytestmark = pytest.mark.gpu

CONFIG = WorkerConfig(
    started_at=0.0,
    folder=str(TINY),
    device="cuda:0",
    dtype="bfloat16",
    quantization="auto",
    kv_cache_dtype="auto",
    plan=ParallelPlan(),
    rank=0,
    member=0,
    members=1,
    dp_rank=0,
    rendezvous="",
    rank_timeout_s=10.0,
    micro_batches=1,
    rebalance_passes=2000,
    threads=1,
    mtp="auto",
    async_scheduling="auto",
    cuda_graphs="on",
    tpot_target_s=0.05,
    ttft_target_s=4.0,
    num_pages=None,
    kv_memory_bytes=0,
    gpu_memory_share=0.5,
    max_model_tokens=1000,
    max_batch_tokens=512,
    max_sequences=16,
    log_level="info",
    faults=FaultDelays(),
)


@pytest.mark.parametrize(("mtp", "graphs"), [("auto", "on"), ("1", "on"), ("0", "off")])
def test_a_worker(mtp: str, graphs: str) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "katydid_engine.worker", "--channel", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:
        theirs.close()
        channel = BlockingChannel(ours.detach())
        channel.send(replace(CONFIG, mtp=mtp, cuda_graphs=graphs))
        until = time.monotonic() + 200
        ready: Ready | None = None
        outputs: dict[int, list[int]] = {handle: [] for handle in range(len(prompts()))}
        open_handles = set(outputs)
        while open_handles and time.monotonic() < until:
            for message in channel.receive(1.0):
                assert not isinstance(message, Failed), message
                if isinstance(message, Ready):
                    ready = message
                    for handle, prompt in enumerate(prompts()):
                        sampling = Sampling(max_tokens=60, ignore_eos=True)
                        channel.send(Submit(Request(handle, prompt, ChainKey(b"m" * 32), sampling)))
                if isinstance(message, StepReport):
                    for row in message.tokens:
                        outputs[row.handle] += row.tokens
                    open_handles -= {end.handle for end in message.ends}
        assert ready is not None
        assert ready.num_pages > 1000, "half of a GPU"
        channel.send(Stop())
        assert process.wait(60) == 0
        channel.close()
    reference = load_model(TINY)
    for handle, prompt in enumerate(prompts()):
        assert len(outputs[handle]) == 60
        assert flips(reference, prompt, outputs[handle], bound=0.3) == 0
