"""Where the instances of the cache service are: a list, a DNS name or a file, and who has joined or left since.

    host-a:7301,host-b:7301      these
    dns:kvcache.svc:7301         every address the name resolves to (a headless Kubernetes service, say)
    file:/etc/katydid/instances  a line an address, `#` begins a comment

A source that fails or names nobody changes nothing: the addresses known last stay.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from katydid_runtime.errors import SettingsError

__all__ = ["Instances"]

_LOOK_S = 2.0

logger = logging.getLogger(__name__)


class Instances:
    """The addresses that `source` names, in order and without doubles. Raises SettingsError for a malformed source.

    `addresses` is empty until the first `refresh` of a DNS name or file.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.addresses: tuple[str, ...] = ()
        if not self.changing:
            self.addresses = tuple(dict.fromkeys(filter(None, (part.strip() for part in source.split(",")))))
            for address in self.addresses:
                _check(address, source)
        elif source.startswith("dns:"):
            _check(source.removeprefix("dns:"), source)

    @property
    def changing(self) -> bool:
        """Whether the source may name others later."""
        return self.source.startswith(("dns:", "file:"))

    async def refresh(self) -> bool:
        """Ask the source again; True when the addresses have changed."""
        if not self.changing:
            return False
        try:
            found = await asyncio.to_thread(_read, self.source)
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("cache instances unknown: %s", error, extra={"source": self.source})
            return False
        if not found or found == self.addresses:
            return False
        self.addresses = found
        logger.info("cache instances: %s", ", ".join(found), extra={"source": self.source})
        return True

    async def follow(self) -> None:
        """Refresh every two seconds, until cancelled."""
        while self.changing:
            await self.refresh()
            await asyncio.sleep(_LOOK_S)


def _read(source: str) -> tuple[str, ...]:
    kind, _, rest = source.partition(":")
    if kind == "file":
        lines = Path(rest).read_text("utf-8").splitlines()
        named = (line.partition("#")[0].strip() for line in lines)
        return tuple(dict.fromkeys(address for address in named if _good(address)))
    host, _, port = rest.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return tuple(sorted({_join(str(place[4][0]), port) for place in found}))


def _join(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _good(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return address.startswith("unix:/") or bool(host and port.isdecimal() and 0 < int(port) < 65_536)


def _check(address: str, source: str) -> None:
    if not _good(address):
        raise SettingsError(
            f"{address!r} is no address of a cache service",
            field="source",
            value=source,
            allowed="HOST:PORT,..., dns:NAME:PORT or file:PATH",
        )
