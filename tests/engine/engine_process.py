"""Real engine and cache processes for tests, and a gateway's half of a session, small enough to read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import EngineServiceStub

START_TIMEOUT_S = 60.0
MAX_CHOICES = 64


class Service:
    """A process of ours that logs READY with its address on stderr; asking for ``address`` waits for that, so several
    can start at once."""

    def __init__(self, module: str, log: Path, *options: str) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *options], stderr=stderr, start_new_session=True
            )
        self._address = ""

    @property
    def address(self) -> str:
        self._address = self._address or self._wait()
        return self._address

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._log.read_bytes().splitlines() if line.startswith(b"{")]

    def metrics(self) -> dict[str, float]:
        """Its /metrics, which it serves a moment after it says READY."""
        deadline = time.monotonic() + 20
        while not (told := [line["address"] for line in self.lines() if line["message"] == "metrics"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (address,) = told
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
            lines = [line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self, timeout_s: float = 20.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def ranks(self) -> list[int]:
        """Processes of an engine's workers, rank by rank; it has others."""
        return [pid for pid in self.children() if b"katydid_engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def _wait(self) -> str:
        given_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < given_up:
            for line in self.lines():
                if str(line["message"]).startswith("READY"):
                    return str(line["address"])
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.stop()
        raise AssertionError(f"no READY (exit code {self.process.returncode}): {self._log.read_text()}")


@contextlib.contextmanager
def service(module: str, folder: Path, *options: str) -> Iterator[Service]:
    log = folder / f"{module}-{len(list(folder.glob('*.log')))}.log"
    running = Service(module, log, "--listen", "127.0.0.1:0", *options)
    try:
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def engine(model: Path, folder: Path, *options: str) -> Iterator[Service]:
    options = ("--model", str(model), "--threads", "1", "--kv-memory-mib", "64", *options)
    with service("katydid_engine", folder, *options) as running:
        yield running


@dataclass(eq=False)
class Answer:
    """What came back for one request."""

    n: int
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    chosen: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    top: dict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    prompt_chosen: list[float] = field(default_factory=list)
    first: pb.FirstToken | None = None
    ends: dict[int, pb.Finish] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output(self) -> list[int]:
        return self.tokens[0]

    @property
    def end(self) -> pb.Finish:
        return self.ends[0]

    def cached(self) -> tuple[int, int, int, int]:
        cached = self.end.cached
        return cached.device, cached.memory, cached.disk, cached.shared

    def phases(self) -> list[str]:
        assert self.first is not None
        return [phase.name for phase in self.first.trace.phases]


class SessionClient:
    """One session. ``frames`` is every frame that arrived, in order."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = EngineServiceStub(channel)
        self.frames: list[pb.SessionResponse] = []
        self.opened = pb.SessionOpened()
        self.answers: dict[int, Answer] = {}
        self.unknown: list[int] = []
        self.broken: BaseException | None = None
        self._numbers = 0
        self._reader: asyncio.Task[None] | None = None

    async def open(self, session_id: str = "", last_frame: int = 0, abandoned: str = "") -> None:
        self._outbound: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        opening = pb.SessionOpen(client="test", session_id=session_id, last_frame=last_frame, abandoned=abandoned)
        self.send(open=opening)
        self.call = self.stub.Session(self._written(self._outbound))
        frame = await self.call.read()
        assert isinstance(frame, pb.SessionResponse)
        assert frame.HasField("opened")
        self.opened = frame.opened
        self._take(frame)
        self._reader = asyncio.create_task(self._read())

    def send(self, **message: object) -> None:
        """Sends a SessionRequest with the one field given."""
        self._outbound.put_nowait(pb.SessionRequest(**message))  # type: ignore[arg-type]

    def submit(self, prompt: Sequence[int], **fields: object) -> Answer:
        """Sends a request; fields of SamplingParams are given by name, others of SubmitRequest too."""
        self._numbers += 1
        message = submission(self._numbers, prompt, **fields)
        answer = self.answers[self._numbers] = Answer(
            message.sampling.n if 1 <= message.sampling.n <= MAX_CHOICES else 1
        )
        self.send(submit=message)
        return answer

    async def generate(self, prompt: Sequence[int], **fields: object) -> Answer:
        answer = self.submit(prompt, **fields)
        await asyncio.wait_for(answer.done.wait(), 60)
        return answer

    async def break_off(self) -> None:
        """Loses the stream without a word."""
        self.call.cancel()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            while isinstance(frame := await self.call.read(), pb.SessionResponse):
                self._take(frame)
                if frame.frame % 16 == 0:
                    self.send(ack=pb.FrameAck(frame=frame.frame))
            self.broken = EOFError(await self.call.details())
        except (grpc.RpcError, asyncio.CancelledError) as error:
            self.broken = error
        finally:
            for answer in self.answers.values():
                answer.done.set()

    async def _written(self, outbound: asyncio.Queue[pb.SessionRequest]) -> AsyncIterator[pb.SessionRequest]:
        while True:
            yield await outbound.get()

    def _take(self, frame: pb.SessionResponse) -> None:
        expected = self.frames[-1].frame + 1 if self.frames else 1
        assert frame.frame == expected, f"frame {frame.frame}, expected {expected}"
        self.frames.append(frame)
        self.unknown += frame.unknown_requests
        columns = [array("I", getattr(frame.tokens, name)) for name in ("requests", "choices", "counts", "tokens")]
        requests, choices, counts, tokens = columns
        start = 0
        for row, request in enumerate(requests):
            choice = choices[row] if choices else 0
            self.answers[request].tokens[choice] += tokens[start : start + counts[row]]
            start += counts[row]
        for logprobs in frame.logprobs:
            answer = self.answers[logprobs.request]
            chosen = list(array("f", logprobs.chosen))
            if logprobs.prompt:
                answer.prompt_chosen += chosen
            else:
                answer.chosen[logprobs.choice] += chosen
                top = zip(array("I", logprobs.top_tokens), array("f", logprobs.top_logprobs), strict=True)
                answer.top[logprobs.choice] += top
        for first in frame.first_tokens:
            assert self.answers[first.request].first is None
            self.answers[first.request].first = first
        for end in frame.finishes:
            answer = self.answers[end.request]
            assert end.choice not in answer.ends
            answer.ends[end.choice] = end
            if len(answer.ends) == answer.n:
                answer.done.set()


def submission(number: int, prompt: Sequence[int], **fields: object) -> pb.SubmitRequest:
    """Greedy by default."""
    names = {descriptor.name for descriptor in pb.SamplingParams.DESCRIPTOR.fields}
    values = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 8, "n": 1}
    values |= {name: fields.pop(name) for name in list(fields) if name in names}  # type: ignore[misc]
    return pb.SubmitRequest(
        request=number,
        request_id=f"r{number}",
        prompt_ids=array("I", prompt).tobytes(),
        sampling=pb.SamplingParams(**values),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


@contextlib.asynccontextmanager
async def session(address: str) -> AsyncIterator[SessionClient]:
    async with grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        await client.open()
        try:
            yield client
        finally:
            await client.break_off()
