"""Who may find whose blocks.

A block's hash already keeps apart what a gateway has salted by tenant, and leaves a public prefix in common. Where even
that must not be shared (its being cached tells that somebody used it), tenant and session go into the name under which
a block is kept: another one can then neither find nor time it, in any tier, and nothing has to be checked at a read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from katydid_cache.asking import Asker

__all__ = ["SHARINGS", "stored_names"]

SHARINGS = ("public_prefix", "tenant", "none")
"""All who know a block's hash; the tenant that wrote it; the session of the tenant that wrote it."""

_DOMAIN = b"katydid-kvcache-scope"
_ID_BYTES = 16


def stored_names(sharing: str, asker: Asker, hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The 32-byte names under which `asker`'s blocks of these hashes are kept; an empty hash stays empty."""
    if sharing == "public_prefix":
        return hashes
    session = asker.session if sharing == "none" else b""
    scope = hashlib.sha256(_DOMAIN + asker.tenant.ljust(_ID_BYTES, b"\0") + session.ljust(_ID_BYTES, b"\0"))
    names = []
    for block_hash in hashes:
        name = scope.copy()
        name.update(block_hash)
        names.append(name.digest() if block_hash else b"")
    return names
