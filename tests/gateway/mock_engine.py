"""An engine without a model: speaks katydid.engine.v1 with scripted tokens, a real prefix cache and chosen delays.

Used in-process by tests and benches, or as a process of its own that can be killed:
`python -m tests.gateway.mock_engine --listen 127.0.0.1:0 --model FOLDER`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from array import array
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import uvloop
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from katydid_runtime.block_hash import BLOCK_TOKENS, fingerprint, hash_chain, pack_ids
from katydid_runtime.server import RpcServer
from katydid_runtime.trace_context import TraceContext

from tests.gateway.mock_frames import ended, logprob_columns, lost, prompt_logprobs
from tests.gateway.mock_options import MockOptions, command_line


@dataclass
class _Running:
    message: pb.SubmitRequest
    received: float
    outputs: list[list[int]]
    cached: int
    sent: int = 0
    ready_at: float = 0.0
    hashing_s: float = 0.0
    prompt_logprobs: pb.TokenLogprobs | None = None


class _Session:
    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.frames: deque[pb.SessionResponse] = deque()
        self.number = 0
        self.running: dict[int, _Running] = {}
        self.wake = asyncio.Event()
        self.detached_at: float | None = None
        self.streams = 0


class MockEngine(EngineServiceServicer):
    """One engine process's worth of behaviour. `submitted`, `aborted` and `finished` record what happened."""

    def __init__(self, options: MockOptions | None = None) -> None:
        self.options = options or MockOptions()
        self.boot_id = uuid.uuid4().hex
        self.submitted: list[pb.SubmitRequest] = []
        self.aborted: list[int] = []
        self.finished = 0
        self.draining = False
        self.address = ""
        self._sessions: dict[str, _Session] = {}
        self._blocks: list[dict[bytes, None]] = [{} for _ in range(self.options.dp_ranks)]
        self._watchers: set[asyncio.Queue[pb.WatchResponse]] = set()
        self._server: RpcServer | None = None
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return sum(len(session.running) for session in self._sessions.values())

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = RpcServer(address, services=["katydid.engine.v1.EngineService"], tls=self.options.tls)
        add_EngineServiceServicer_to_server(self, self._server.grpc)
        self.address = await self._server.start()
        await self._server.set_serving(True)
        self._loop_task = asyncio.create_task(self._steps())
        return self.address

    async def stop(self) -> None:
        """Ends at once, streams included: what a killed process looks like from outside."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        if self._server is not None:
            await self._server.grpc.stop(grace=0)
        self._sessions.clear()

    def drop_streams(self) -> None:
        """Breaks every Session stream but keeps its requests, as a lost connection would."""
        for session in self._sessions.values():
            session.streams += 1
            session.wake.set()

    def lose_worker(self) -> None:
        """What an engine says whose worker has died: it ends all requests itself, and takes no more."""
        self.options.refusal = pb.RequestError(reason="UNAVAILABLE", message="the engine is failing", retryable=True)
        for session in self._sessions.values():
            for number, running in session.running.items():
                for choice in range(len(running.outputs)):
                    self._emit(session, lost(number, choice))
            session.running.clear()

    def change_role(self, role: pb.Role) -> None:
        """Takes a role and says so in a frame, as after SetRole."""
        self.options.role = role
        self.say(pb.SessionResponse())

    def say(self, frame: pb.SessionResponse) -> None:
        """Sends a frame on every session."""
        for session in self._sessions.values():
            self._emit(session, pb.SessionResponse.FromString(frame.SerializeToString()))

    async def Describe(self, _request: pb.DescribeRequest, _context: object) -> pb.DescribeResponse:
        options = self.options
        message = pb.DescribeResponse(
            model=options.model,
            identity=options.identity,
            hash_fingerprint=options.hash_fingerprint or fingerprint(options.identity),
            block_tokens=options.block_tokens,
            max_model_tokens=options.max_model_tokens,
            vocab_size=options.vocab_size,
            dp_ranks=options.dp_ranks,
            pages_per_rank=options.pages,
            role=options.role,
            eos_token_ids=[options.eos],
            boot_id=self.boot_id,
            max_choices=options.max_choices,
            max_logprobs=options.max_logprobs,
            tokenizer_digest=options.tokenizer_digest,
            golden_digest=options.golden_digest,
            kv_cache_attached=options.kv_cache_attached,
            kvcache_instance=options.kvcache_instance,
            grammar_kinds=options.grammar_kinds,
            block_bytes=1 << 20,
        )
        message.reattach_window.FromNanoseconds(int(options.reattach_window_s * 1e9))
        return message

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], _context: object
    ) -> AsyncIterator[pb.SessionResponse]:
        first = await anext(request_iterator)
        if (given_up := self._sessions.get(first.open.abandoned)) is not None:
            given_up.running.clear()
        known = self._sessions.get(first.open.session_id)
        session = known or _Session()
        self._sessions[session.id] = session
        session.streams += 1
        stream = session.streams
        session.detached_at = None
        sent = first.open.last_frame if known else 0
        opened = pb.SessionOpened(session_id=session.id, running=list(session.running), boot_id=self.boot_id)
        reader = asyncio.create_task(self._read(session, request_iterator))
        if not any(frame.frame > sent for frame in session.frames):
            self._emit(session, pb.SessionResponse())
        try:
            while session.streams == stream:
                session.wake.clear()
                for frame in [frame for frame in session.frames if frame.frame > sent]:
                    out = pb.SessionResponse()
                    out.CopyFrom(frame)
                    if opened is not None:
                        out.opened.CopyFrom(opened)
                        opened = None
                    sent = frame.frame
                    yield out
                await session.wake.wait()
        finally:
            reader.cancel()
            session.detached_at = time.monotonic()
            asyncio.get_running_loop().call_later(self.options.reattach_window_s, self._abandon, session)

    def _abandon(self, session: _Session) -> None:
        """Nobody has taken the session up again within its window."""
        if session.detached_at is not None and time.monotonic() - session.detached_at >= self.options.reattach_window_s:
            session.running.clear()

    async def Watch(self, _request: pb.WatchRequest, _context: object) -> AsyncIterator[pb.WatchResponse]:
        queue: asyncio.Queue[pb.WatchResponse] = asyncio.Queue()
        sequence = 0
        snapshots = [
            pb.BlockSnapshot(dp_rank=rank, hashes=b"".join(blocks), last=rank == len(self._blocks) - 1)
            for rank, blocks in enumerate(self._blocks)
        ]
        self._watchers.add(queue)
        try:
            for snapshot in snapshots:
                sequence += 1
                yield pb.WatchResponse(boot_id=self.boot_id, sequence=sequence, snapshot=snapshot)
            while True:
                event = await queue.get()
                sequence += 1
                event.sequence = sequence
                yield event
        finally:
            self._watchers.discard(queue)

    async def Drain(self, _request: object, _context: object) -> pb.DrainResponse:
        self.draining = True
        self.say(pb.SessionResponse())
        return pb.DrainResponse()

    async def _read(self, session: _Session, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(session, message.submit)
                case "abort":
                    self.aborted.append(message.abort.request)
                    if session.running.pop(message.abort.request, None) is not None:
                        self._emit(session, ended(message.abort.request, pb.FINISH_REASON_ABORT))
                case "ack":
                    while session.frames and session.frames[0].frame <= message.ack.frame:
                        session.frames.popleft()

    def _submit(self, session: _Session, message: pb.SubmitRequest) -> None:
        received = time.monotonic()
        self.submitted.append(message)
        if self.options.deaf:
            return
        if self.options.refusal is not None:
            frame = ended(message.request, pb.FINISH_REASON_ERROR)
            frame.finishes[0].error.CopyFrom(self.options.refusal)
            self._emit(session, frame)
            return
        prompt = array("I", message.prompt_ids)
        sampling = message.sampling
        outputs = [self.options.script(prompt, sampling, choice)[: sampling.max_tokens] for choice in range(sampling.n)]
        if generated := array("I", message.generated_ids).tolist():
            assert outputs[0][: len(generated)] == generated, "it would have said something else"
            outputs = [outputs[0][len(generated) :]]
        chain = hash_chain(
            message.prompt_ids,
            identity=self.options.identity,
            salt=message.cache_salt,
            public_blocks=message.public_blocks,
        )
        cached = self._cache(message.dp_rank, [chain[at : at + 32] for at in range(0, len(chain), 32)])
        options, now = self.options, time.monotonic()
        delay = options.queue_s + options.lookup_s + options.fetch_s + options.prefill_s + options.handover_s
        # Blocks alone never come: somebody else must end it.
        delay = math.inf if message.fetch_only else delay
        session.running[message.request] = _Running(
            message,
            received,
            outputs,
            min(cached * BLOCK_TOKENS, len(prompt) - 1),
            ready_at=now + delay,
            hashing_s=now - received,
        )
        if sampling.HasField("prompt_logprobs"):
            # The last part comes with the first token, those before it in a frame of their own.
            *before, last = prompt_logprobs(message.request, prompt, self.options.prompt_part)
            session.running[message.request].prompt_logprobs = last
            if before:
                self._emit(session, pb.SessionResponse(logprobs=before))

    def _cache(self, rank: int, hashes: list[bytes]) -> int:
        """Leading blocks known before; afterwards all are, and watchers hear of it."""
        blocks = self._blocks[rank]
        known = next((place for place, block in enumerate(hashes) if block not in blocks), len(hashes))
        if fresh := [block for block in hashes if block not in blocks]:
            blocks.update(dict.fromkeys(fresh))
            removed = list(blocks)[: max(0, len(blocks) - self.options.pages)]
            for block in removed:
                del blocks[block]
            for queue in self._watchers:
                delta = pb.BlockDelta(dp_rank=rank, stored=b"".join(fresh), removed=b"".join(removed))
                queue.put_nowait(pb.WatchResponse(boot_id=self.boot_id, delta=delta))
        return known

    async def _steps(self) -> None:
        due = time.monotonic()
        while True:
            # At a rate that what a step takes does not change.
            due = max(due + (self.options.step_s or 0.001), time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            for session in list(self._sessions.values()):
                if session.running:
                    self._step(session)

    def _step(self, session: _Session) -> None:
        frame = pb.SessionResponse()
        requests, choices, counts, tokens = array("I"), array("I"), array("I"), array("I")
        for number, running in list(session.running.items()):
            if time.monotonic() < running.ready_at:
                continue
            if running.sent == 0:
                first = frame.first_tokens.add(request=number)
                first.cached.device = running.cached
                first.trace.CopyFrom(self._trace(running, decode=False))
            end = running.sent + self.options.tokens_per_step
            for choice, output in enumerate(running.outputs):
                row = output[running.sent : end]
                if row and self.options.clock is not None:
                    row = [self.options.clock.token(time.monotonic())] * len(row)
                if row:
                    requests.append(number)
                    choices.append(choice)
                    counts.append(len(row))
                    tokens.extend(row)
                    self._add_logprobs(frame, number, choice, row, running)
                if running.sent < len(output) <= end or (not output and running.sent == 0):
                    self._finish(frame, number, choice, running, output)
            running.sent = end
            if all(len(output) <= end for output in running.outputs):
                del session.running[number]
                self.finished += 1
        if requests or frame.finishes:
            frame.tokens.requests, frame.tokens.counts = pack_ids(requests), pack_ids(counts)
            frame.tokens.choices = pack_ids(choices) if any(choices) else b""
            frame.tokens.tokens = pack_ids(tokens)
            self._emit(session, frame)

    def _finish(
        self, frame: pb.SessionResponse, number: int, choice: int, running: _Running, output: list[int]
    ) -> None:
        stopped = bool(output) and output[-1] in {self.options.eos, *running.message.sampling.stop_token_ids}
        made = len(running.message.generated_ids) // 4 + len(output)
        short = made < running.message.sampling.max_tokens
        finish = frame.finishes.add(
            request=number,
            choice=choice,
            reason=pb.FINISH_REASON_STOP if stopped or short else pb.FINISH_REASON_LENGTH,
            prompt_tokens=len(running.message.prompt_ids) // 4,
            output_tokens=len(output),
        )
        finish.cached.device = running.cached
        if stopped:
            finish.stop_token = output[-1]
        finish.trace.CopyFrom(self._trace(running, decode=True))

    def _add_logprobs(
        self, frame: pb.SessionResponse, number: int, choice: int, row: list[int], running: _Running
    ) -> None:
        sampling = running.message.sampling
        if sampling.HasField("prompt_logprobs") and running.sent == 0 and choice == 0:
            frame.logprobs.append(running.prompt_logprobs)
        if sampling.HasField("logprobs"):
            frame.logprobs.append(logprob_columns(number, choice, array("I", row), sampling.logprobs))

    def _trace(self, running: _Running, *, decode: bool) -> pb.TraceSummary:
        options, now = self.options, time.monotonic()
        sampled = TraceContext.parse(running.message.traceparent)
        summary = pb.TraceSummary()
        phases = {
            "engine.queue": options.queue_s + running.hashing_s,
            "kvcache.lookup": options.lookup_s,
            "kvcache.fetch": options.fetch_s,
            "engine.prefill": options.prefill_s,
        }
        if decode:
            phases["engine.decode"] = now - running.ready_at
        else:
            # Waiting for the step is prefill too: the mock computes nothing in it.
            phases["engine.prefill"] += max(0.0, now - running.ready_at)
        for name, seconds in phases.items():
            phase = summary.phases.add(name=name, tier="memory" if name == "kvcache.fetch" else "")
            phase.duration.FromNanoseconds(int(seconds * 1e9))
            if sampled is not None and sampled.sampled:
                phase.span_id = options.span_ids.get(name, hashlib.sha256(name.encode()).digest()[:8])
        summary.residence.FromNanoseconds(int((now - running.received) * 1e9))
        summary.handover.FromNanoseconds(int(options.handover_s * 1e9))
        return summary

    def _emit(self, session: _Session, frame: pb.SessionResponse) -> None:
        session.number += 1
        frame.frame = session.number
        frame.draining = self.draining
        frame.role = self.options.role
        waiting = sum(
            len(running.message.prompt_ids) // 4 - running.cached
            for running in session.running.values()
            if not running.sent
        )
        for rank in range(self.options.dp_ranks):
            frame.loads.add(
                dp_rank=rank,
                running=len(session.running),
                waiting_uncached_tokens=waiting,
                free_pages=self.options.pages,
                total_pages=self.options.pages,
                prefill_tokens_per_second=10_000.0,
            )
        session.frames.append(frame)
        session.wake.set()


async def _serve(listen: str, options: MockOptions) -> None:
    engine = MockEngine(options)
    print("READY", await engine.start(listen), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(*command_line(__doc__)))
