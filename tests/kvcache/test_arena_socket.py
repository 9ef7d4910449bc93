"""The arena's descriptor goes to who shows a token, once, and the socket outlives a moment without descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from katydid_kvcache import arena_socket
from katydid_kvcache.arena_socket import ArenaSocket
from katydid_runtime.errors import SettingsError

CONTENT = b"the arena"


def ask(path: str, token: bytes) -> bytes | None:
    """The content behind the descriptor that came, None when the token was refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect(path)
        connection.sendall(token)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        return None
    content = os.pread(descriptors[0], 100, 0)
    os.close(descriptors[0])
    return content


def serve(folder: Path, scenario: Any) -> None:
    async def body() -> None:
        descriptor = os.memfd_create("test-arena")
        os.write(descriptor, CONTENT)
        arena = ArenaSocket(str(folder / "arena"), descriptor, asyncio.Protocol)
        arena.start()
        try:
            await scenario(arena)
        finally:
            await arena.stop()
            os.close(descriptor)

    asyncio.run(body())


def test_a_token_is_good_for_one_descriptor(tmp_path: Path) -> None:
    async def scenario(arena: ArenaSocket) -> None:
        token, revoked = await arena.issue(), await arena.issue()
        arena.revoke(revoked)
        assert await asyncio.to_thread(ask, arena.path, token) == CONTENT
        for useless in (token, revoked, bytes(16), b"short"):
            assert await asyncio.to_thread(ask, arena.path, useless) is None

    serve(tmp_path, scenario)
    assert not (tmp_path / "arena").exists()


def test_a_moment_without_descriptors_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_socket, "_RETRY_S", 0.01)

    async def scenario(arena: ArenaSocket) -> None:
        loop: Any = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")] * 3

        async def sparse(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(listener)

        loop.sock_accept = sparse
        token = await arena.issue()
        assert await asyncio.to_thread(ask, arena.path, token) == CONTENT
        assert not failures

    serve(tmp_path, scenario)


def test_a_path_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    async def body() -> None:
        with pytest.raises(SettingsError, match="cannot listen") as caught:
            ArenaSocket(str(tmp_path / "nowhere" / "arena"), 0, asyncio.Protocol).start()
        assert caught.value.field == "listen"

    asyncio.run(body())
