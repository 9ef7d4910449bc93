"""The worker processes of one data-parallel rank, seen from the face: start, messages, death, stop.

A worker that dies closes its socket, which the face sees at once; one that hangs falls silent, which ``stalled`` shows.
A silent first rank of several ends its group; other ranks' silence ends it through the ranks that wait for them.
There is no restart: a group that lost a rank has lost its pages, so the engine ends and is started anew as a whole.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from katydid_runtime.errors import EngineLostError, InternalError, KatydidError, UnavailableError, error_from_details
from katydid_runtime.rpc_errors import internal_error

from katydid_engine.channel import ChannelClosed, FaceChannel
from katydid_engine.messages import (
    Alive,
    ExpertBalance,
    Failed,
    Flush,
    Profile,
    Ready,
    Reply,
    StepReport,
    Stop,
    ToWorker,
)
from katydid_engine.plan_ring import ring_bytes
from katydid_engine.worker_config import RingEnds, WorkerConfig

__all__ = ["WorkerGroup"]

_RING_BYTES = 16 * 1024 * 1024
_STOP_TIMEOUT_S, _FAILED_STOP_TIMEOUT_S = 3.0, 0.3
_FLUSH_TIMEOUT_S = 10.0


class WorkerGroup:
    """``config`` is that of rank 0. ``failure`` is set once, when a worker ends on its own, and holds why.

    ``on_report`` gets every StepReport; before the first request they hold nothing but loads. ``on_balance`` hears of
    redundant experts.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.failure: asyncio.Future[KatydidError] = asyncio.get_running_loop().create_future()
        self._config = config
        self.on_report: Callable[[StepReport], None] = lambda _: None
        self.on_balance: Callable[[ExpertBalance], None] = lambda _: None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[FaceChannel] = []
        self._readers: list[asyncio.Task[None]] = []
        self._ready: list[asyncio.Future[Ready]] = []
        self._calls = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._heard_at = time.monotonic()
        self._stopping = False

    async def start(self) -> Ready:
        """Starts all ranks and waits until each has its model; returns what rank 0 says.

        Raises:
            KatydidError: what a worker failed with; ModelFolderError and SettingsError among them.
        """
        members = self._config.members
        descriptors: list[int] = []
        ring = self._make_ring(members - 1) if members > 1 else None
        if ring is not None:
            descriptors += [ring.memory, *ring.bells]
        for member in range(members):
            config = replace(
                self._config,
                started_at=time.monotonic(),
                member=member,
                rank=_world_rank(self._config, member),
                device=self._config.device if member == 0 else _next_device(self._config.device, member),
                ring=ring,
            )
            await self._spawn(config, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        failed = asyncio.ensure_future(asyncio.shield(self.failure))
        all_ready = asyncio.ensure_future(asyncio.gather(*self._ready))
        await asyncio.wait((failed, all_ready), return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        all_ready.cancel()
        if self.failure.done():
            raise self.failure.result()
        return self._ready[0].result()

    def send(self, message: ToWorker) -> None:
        """To rank 0, which schedules."""
        self._channels[0].send(message)

    async def flush(self) -> int:
        """Empties the prefix cache; returns the number of blocks dropped. Raises UnavailableError."""
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                reply = await self._call(lambda call: Flush(call))
        except TimeoutError:
            raise UnavailableError(f"the step loop has not answered for {_FLUSH_TIMEOUT_S} s") from None
        return int(reply.value)

    async def profile(self, steps: int, path: str) -> None:
        """Returns when the profile is written. Raises InternalError when it cannot be recorded."""
        await self._call(lambda call: Profile(call, steps, path))

    def stalled(self, timeout_s: float) -> bool:
        """Whether rank 0's loop has been silent for so long."""
        return self.silence_s > timeout_s

    @property
    def silence_s(self) -> float:
        """How long rank 0's loop has been silent."""
        return time.monotonic() - self._heard_at

    def check_voice(self, timeout_s: float) -> None:
        """A group of several ranks has failed when its first one is silent for so long: the others wait for it."""
        if self._config.plan.world_size > 1 and self.stalled(timeout_s):
            self._fail(EngineLostError(f"worker {self._config.dp_rank}.0 has been silent for {timeout_s} s"))

    async def stop(self, *, failed: bool = False) -> None:
        """Ends all ranks, by force where they do not listen; for a moment only where they, or those that they compute
        with, have ``failed``: they wait for each other, and have nothing left to put in order."""
        self._stopping = True
        for channel in self._channels:
            channel.send(Stop())
        if self._readers:
            # A worker's channel ends when it does.
            await asyncio.wait(self._readers, timeout=_FAILED_STOP_TIMEOUT_S if failed else _STOP_TIMEOUT_S)
        for process in self._processes:
            process.kill()
            await asyncio.to_thread(process.wait)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for channel in self._channels:
            channel.close()

    async def _call(self, message: Callable[[int], ToWorker]) -> Reply:
        call = next(self._calls)
        future = self._replies[call] = asyncio.get_running_loop().create_future()
        self.send(message(call))
        try:
            reply: Reply = await future
        finally:
            del self._replies[call]
        if reply.failed:
            raise InternalError(str(reply.value))
        return reply

    def _make_ring(self, readers: int) -> RingEnds:
        memory = os.memfd_create("katydid-plans")
        os.ftruncate(memory, ring_bytes(readers, _RING_BYTES))
        return RingEnds(memory, tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(readers)))

    async def _spawn(self, config: WorkerConfig, descriptors: list[int]) -> None:
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno(), *descriptors]
        if config.staging_memory is not None:
            inherited.append(config.staging_memory)
        command = [sys.executable, "-m", "katydid_engine.worker", "--channel", str(theirs.fileno())]
        # Starting a process takes a millisecond, and nothing is served yet.
        self._processes.append(
            subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        )
        theirs.close()
        channel = await FaceChannel.open(ours)
        channel.send(config)
        self._channels.append(channel)
        self._ready.append(asyncio.get_running_loop().create_future())
        self._readers.append(asyncio.create_task(self._read(channel, config.member)))

    async def _read(self, channel: FaceChannel, rank: int) -> None:
        where = f"worker {self._config.dp_rank}.{rank}"
        try:
            while True:
                message = await channel.receive()
                if rank == 0:
                    self._heard_at = time.monotonic()
                match message:
                    case StepReport():
                        self.on_report(message)
                    case Alive():
                        pass
                    case ExpertBalance():
                        self.on_balance(message)
                    case Reply(call) if call in self._replies:
                        self._replies[call].set_result(message)
                    case Ready() if not self._ready[rank].done():
                        self._ready[rank].set_result(message)
                    case Failed(reason, text):
                        self._fail(error_from_details(reason, text, {}))
        except ChannelClosed:
            self._fail(EngineLostError(f"{where} ended unexpectedly"))
        except Exception as error:
            # A defect in whoever takes the reports; without its reader the group would only fall silent.
            self._fail(internal_error(error, f"reports of {where}"))

    def _fail(self, error: KatydidError) -> None:
        if self._stopping or self.failure.done():
            return
        self.failure.set_result(error)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)


def _world_rank(config: WorkerConfig, member: int) -> int:
    """Of a member of the group whose first member has ``config``: TP ranks of a stage first, then of the next."""
    stage, tp = divmod(member, config.plan.tp)
    return config.rank + stage * config.plan.tp * config.plan.dp + tp


def _next_device(device: str, rank: int) -> str:
    name, _, index = device.partition(":")
    return f"{name}:{int(index) + rank}" if index else device
