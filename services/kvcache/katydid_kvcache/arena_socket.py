"""Passes the arena's descriptor to clients of this host over a Unix socket, against a one-time token.

The connection stays open for short calls, see `local_calls`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import weakref
from collections.abc import Callable

from katydid_runtime.errors import SettingsError

__all__ = ["TOKEN_BYTES", "ArenaSocket"]

TOKEN_BYTES = 16
_TIMEOUT_S = 5.0
_RETRY_S = 0.5

logger = logging.getLogger(__name__)


class ArenaSocket:
    """Listens at `path` for clients that show a token from `issue`; each gets `descriptor` once, by SCM_RIGHTS.

    After that the connection is served by what `connected` makes.
    """

    def __init__(self, path: str, descriptor: int, connected: Callable[[], asyncio.Protocol]) -> None:
        self.path = path
        self._descriptor = descriptor
        self._connected = connected
        self._transports: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()
        self._tokens: set[bytes] = set()
        self._listening: asyncio.Task[None] | None = None
        self._started = asyncio.Event()

    async def issue(self) -> bytes:
        """A new token, once the socket can be connected to."""
        await self._started.wait()
        token = secrets.token_bytes(TOKEN_BYTES)
        self._tokens.add(token)
        return token

    def revoke(self, token: bytes) -> None:
        self._tokens.discard(token)

    def start(self) -> None:
        """Listen. Whoever owns the service's main address owns this path: what is there is left from before.

        Raises SettingsError when the path is no good.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            listener.bind(self.path)
            os.chmod(self.path, 0o660)
            listener.listen(16)
        except OSError as error:
            listener.close()
            raise SettingsError(
                f"cannot listen on {self.path}: {error}", field="listen", value=self.path, allowed="a shorter path"
            ) from error
        listener.setblocking(False)
        self._listening = asyncio.create_task(self._listen(listener))
        self._started.set()

    async def stop(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            for transport in self._transports:
                transport.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as clients:
            with listener:
                while True:
                    try:
                        connection, _ = await loop.sock_accept(listener)
                    except OSError as error:
                        # Mostly a process out of descriptors: whoever waits is served once there are some again.
                        logger.error("cannot take a client of the arena: %s", error)
                        await asyncio.sleep(_RETRY_S)
                        continue
                    clients.create_task(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as closing, contextlib.suppress(OSError, TimeoutError):
            closing.push(connection)
            async with asyncio.timeout(_TIMEOUT_S):
                token = await loop.sock_recv(connection, TOKEN_BYTES)
            if token in self._tokens:
                self._tokens.discard(token)
                socket.send_fds(connection, [b"\0"], [self._descriptor])
                transport, _ = await loop.connect_accepted_socket(self._connected, connection)
                self._transports.add(transport)
                closing.pop_all()
