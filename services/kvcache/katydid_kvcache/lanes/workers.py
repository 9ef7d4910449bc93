"""The receiver processes of pulls: started when first needed, given one order at a time, replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys

from katydid_kvcache.arena import Arena
from katydid_kvcache.lanes.orders import ARRIVED_NOT, MESSAGE_BYTES, Credentials, LaneOrder, StreamOrder

__all__ = ["LaneWorkers"]

logger = logging.getLogger(__name__)


class _Worker:
    """One process and the socket to it."""

    def __init__(self, arena: Arena, credentials: Credentials) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Over the socket, not the command line, which everybody may read.
            self.socket.sendall(credentials.pack())
            self.socket.setblocking(False)
            words = [str(arena.fd), str(arena.bytes), str(theirs.fileno())]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "katydid_kvcache.lanes.receiver", *words],
                pass_fds=(arena.fd, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is for the service to act on
            )

    def end(self) -> None:
        """Kill it and see it dead: from then on nobody writes into the slots it was given."""
        self.socket.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class LaneWorkers:
    """At most `count` receiver processes over `arena`. Belongs to one event loop."""

    def __init__(self, arena: Arena, count: int, credentials: Credentials) -> None:
        self.count = count
        self._arena = arena
        self._credentials = credentials
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._places = asyncio.Semaphore(count)

    async def run(self, order: LaneOrder | StreamOrder) -> list[bytes | None]:
        """Checksum of each block of the order that arrived and is right; none when its worker died.

        When this is cancelled the worker is killed first, so that the blocks' slots may be given to others. An order
        that a worker had when it was found dead goes to a new one.
        """
        async with self._places:
            idle = self._idle_one()
            answer = await self._ask(idle, order) if idle is not None else None
            if answer is None:
                answer = await self._ask(_Worker(self._arena, self._credentials), order)
            if answer is None:
                return [None] * len(order.places)
            checksums = (answer[at : at + len(ARRIVED_NOT)] for at in range(0, len(answer), len(ARRIVED_NOT)))
            return [None if checksum == ARRIVED_NOT else checksum for checksum in checksums]

    async def _ask(self, worker: _Worker, order: LaneOrder | StreamOrder) -> bytes | None:
        """The worker's answer to an order; None when it died, or may as well have."""
        self._busy.add(worker)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(worker.socket, order.pack())
            answer = await loop.sock_recv(worker.socket, MESSAGE_BYTES)
            if len(answer) != len(ARRIVED_NOT) * len(order.places):
                raise ConnectionError(f"it answered {len(answer)} bytes for {len(order.places)} blocks")
        except BaseException as error:
            worker.end()
            if not isinstance(error, OSError):
                raise
            logger.error("a lane worker is gone: %s", error, extra={"worker": worker.process.pid})
            return None
        else:
            self._idle.append(worker)
            return answer
        finally:
            self._busy.discard(worker)

    def _idle_one(self) -> _Worker | None:
        """A worker that has nothing to do; those that died meanwhile are cleared away."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.end()
        return None

    def stop(self) -> None:
        """End all workers."""
        for worker in (*self._idle, *self._busy):
            worker.end()
        self._idle.clear()

    @property
    def pids(self) -> list[int]:
        """Processes running now."""
        return [worker.process.pid for worker in (*self._idle, *self._busy)]
