"""From addresses as settings have them to a client: of one service, of many instances as one cache, or of both."""

from __future__ import annotations

from typing import TypeAlias

from katydid_runtime.errors import SettingsError
from katydid_runtime.tls import Tls

from katydid_cache.client import CacheClient
from katydid_cache.fleet import CacheFleet
from katydid_cache.instances import Instances
from katydid_cache.near import NearCache

__all__ = ["Cache", "open_cache"]

Cache: TypeAlias = "CacheClient | CacheFleet | NearCache"


def open_cache(
    address: str,
    *,
    others: str | None = None,
    name: str = "",
    tls: Tls | None = None,
    token: str | None = None,
    lanes: int = 1,
) -> Cache:
    """A degrading client of one service ("host:port", "unix:/path") or of all that a source of `Instances` names.

    With `others`, a source as well, `address` is this host's instance, which pulls what they have. Raises SettingsError
    for a malformed address, and for several with `others`.
    """
    instances = Instances(address)
    if len(instances.addresses) != 1:
        if others is not None:
            raise SettingsError(
                f"{address} is more than one service, and others are named beside",
                field="kvcache_address",
                value=address,
                allowed="this host's instance alone",
            )
        return CacheFleet(instances, name=name, tls=tls, token=token, lanes=lanes)
    near = CacheClient(instances.addresses[0], name=name, degrade=True, tls=tls, token=token, lanes=lanes)
    if others is None:
        return near
    return NearCache(near, CacheFleet(Instances(others), name=name, tls=tls, token=token, lanes=lanes))
