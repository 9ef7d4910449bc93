"""The worker processes of a pull: started when first needed, given one order at a time, replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys

from katydid_kvcache.arena import Arena
from katydid_kvcache.lanes.receiver import ORDER_BYTES, Order

__all__ = ["LaneWorkers"]

logger = logging.getLogger(__name__)


class _Worker:
    """One process and the socket to it."""

    def __init__(self, arena: Arena) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
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

    def __init__(self, arena: Arena, count: int) -> None:
        self.count = count
        self._arena = arena
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._places = asyncio.Semaphore(count)

    async def run(self, order: Order) -> list[bool]:
        """Which blocks of the order arrived right; none when its worker died.

        When this is cancelled the worker is killed first, so that the blocks' slots may be given to others.
        """
        async with self._places:
            worker = self._idle.pop() if self._idle else _Worker(self._arena)
            self._busy.add(worker)
            try:
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(worker.socket, order.pack())
                flags = await loop.sock_recv(worker.socket, ORDER_BYTES)
                if len(flags) != len(order.places):
                    raise ConnectionError(f"it answered {len(flags)} bytes for {len(order.places)} blocks")
            except BaseException as error:
                worker.end()
                if not isinstance(error, OSError):
                    raise
                logger.error("a lane worker is gone: %s", error, extra={"worker": worker.process.pid})
                return [False] * len(order.places)
            else:
                self._idle.append(worker)
                return [bool(flag) for flag in flags]
            finally:
                self._busy.discard(worker)

    def stop(self) -> None:
        """End all workers."""
        for worker in (*self._idle, *self._busy):
            worker.end()
        self._idle.clear()

    @property
    def pids(self) -> list[int]:
        """Processes running now."""
        return [worker.process.pid for worker in (*self._idle, *self._busy)]
