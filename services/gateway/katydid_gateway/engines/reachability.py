"""Tells a process that is gone from one that is slow or cut off: a closed port refuses at once."""

from __future__ import annotations

import asyncio

__all__ = ["refuses_connections"]

PROBE_TIMEOUT_S = 1.0


async def refuses_connections(address: str) -> bool:
    """Whether connecting to `host:port` or `unix:/path` fails outright; a probe that gets no answer says False."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            if address.startswith("unix:"):
                _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return False
    except OSError:
        return True
    writer.close()
    return False
