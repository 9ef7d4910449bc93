"""From an address as settings have it to a client: of one service, or of many instances as one cache."""

from __future__ import annotations

from typing import TypeAlias

from katydid_runtime.tls import Tls

from katydid_cache.client import CacheClient
from katydid_cache.fleet import CacheFleet
from katydid_cache.instances import Instances

__all__ = ["Cache", "open_cache"]

Cache: TypeAlias = "CacheClient | CacheFleet"


def open_cache(
    address: str, *, name: str = "", tls: Tls | None = None, token: str | None = None, lanes: int = 1
) -> Cache:
    """A degrading client of one service ("host:port", "unix:/path") or of all that a source of `Instances` names.

    Raises SettingsError for a malformed address.
    """
    instances = Instances(address)
    if len(instances.addresses) == 1:
        return CacheClient(instances.addresses[0], name=name, degrade=True, tls=tls, token=token, lanes=lanes)
    return CacheFleet(instances, name=name, tls=tls, token=token, lanes=lanes)
