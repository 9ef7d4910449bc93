"""uvicorn inside the gateway's own event loop: the process, not uvicorn, handles signals and decides when to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from katydid_runtime.errors import AddressInUseError
from katydid_runtime.exposition import split_address
from katydid_runtime.tls import CertificateWatch, ServerTls
from starlette.types import ASGIApp

from katydid_gateway.http.whole_writes import WholeWrites

__all__ = ["HttpServer"]

BACKLOG = 4096
_LOOK_S = 1.0
KEEP_ALIVE_S = 75

logger = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves `app` on `host:port`, as HTTPS when there is `tls`, whose files are read again when they change.

    An authority of clients that is taken out of its file stays trusted until the process starts again.
    """

    def __init__(self, app: ASGIApp, tls: ServerTls | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=WholeWrites,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # Who a caller is, says its key alone.
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ssl_certfile=tls.cert_file if tls else None,
            ssl_keyfile=tls.key_file if tls else None,
            ssl_ca_certs=tls.client_ca_file if tls else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca_file else ssl.CERT_NONE,
        )
        self._config = config
        self._tls = tls
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, address: str, *, reuse_port: bool = False) -> str:
        """Listen, with `reuse_port` beside other processes; returns the address with the port really bound.

        Raises AddressInUseError, SettingsError.
        """
        host, port = split_address(address)
        # asyncio sets TCP_NODELAY only where the protocol is named; without it an answer waits 40 ms for an ACK.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise AddressInUseError(
                f"cannot listen on {address}: {error.strerror}", field="http_listen", value=address
            ) from error
        self._config.load()
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        if self._tls is not None:
            self._watching = asyncio.create_task(self._follow(self._tls))
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Close idle connections at once and busy ones within a second."""
        if self._watching is not None:
            self._watching.cancel()
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    async def _follow(self, tls: ServerTls) -> None:
        """The context of the listener takes new files up; connections that stand keep theirs."""
        watch = CertificateWatch(tls)
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._config.ssl is None or not watch.changed():
                continue
            try:
                self._config.ssl.load_cert_chain(tls.cert_file, tls.key_file)
                if tls.client_ca_file is not None:
                    self._config.ssl.load_verify_locations(tls.client_ca_file)
            except OSError as error:
                # They have changed again since they were looked at, which the next look sees.
                logger.error("certificates stay as they were: %s", error)
