"""For whom a client asks: the tenant and the session of all calls made inside a `with asking(...)` block.

    with asking(Asker(tenant=b"..16 bytes..", session=b"..16 bytes..", session_ttl_s=1800, sliding=True)):
        found = await cache.lookup(hashes)

It holds for tasks that are started inside, and so for every instance and every path that a call may take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from katydid_runtime.duration import to_duration

__all__ = ["Asker", "asking", "signed"]

Request = TypeVar("Request", bound=Any)


@dataclass(frozen=True, slots=True)
class Asker:
    """Opaque ids of 16 bytes, or empty. `session_ttl_s` None: what the service's policy says of sessions."""

    tenant: bytes = b""
    session: bytes = b""
    session_ttl_s: float | None = None
    sliding: bool = False


_NOBODY = Asker()
_current: ContextVar[Asker] = ContextVar("katydid_cache_asker", default=_NOBODY)


@contextmanager
def asking(asker: Asker) -> Iterator[None]:
    """All calls inside are made for `asker`."""
    token = _current.set(asker)
    try:
        yield
    finally:
        _current.reset(token)


def signed(request: Request) -> Request:
    """The request with tenant and session filled in; a tenant that it names already stays."""
    asker = _current.get()
    if asker.tenant and not request.tenant:
        request.tenant = asker.tenant
    if asker.session:
        if request.DESCRIPTOR.fields_by_name["session"].message_type is None:
            request.session = asker.session
        else:
            request.session.id = asker.session
            request.session.sliding = asker.sliding
            if asker.session_ttl_s is not None:
                request.session.ttl.CopyFrom(to_duration(asker.session_ttl_s))
    return request
