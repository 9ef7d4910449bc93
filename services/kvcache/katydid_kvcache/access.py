"""Who may call what: bearer tokens with scopes, kept as SHA-256 digests and checked on every RPC.

A file has one token a line, `NAME SCOPES DIGEST`: scopes out of read, write and admin separated by commas, none of
which implies another; the digest in hex; `#` begins a comment. Tokens are long random strings, so a plain digest is
enough, and looking it up takes the same time whatever the token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.errors import PermissionDeniedError, SettingsError, UnauthenticatedError

__all__ = ["SCOPES", "Access", "load_access"]

_WRITES = frozenset({"Put", "Reserve", "Commit", "Pull"})
_LINE = re.compile(r"(\S+)\s+([a-z,]+)\s+([0-9a-fA-F]{64})")


class _Bearer(NamedTuple):
    name: str
    scopes: frozenset[str]


def _scope(service: str, method: str) -> str:
    if service == "AdminService":
        return "admin"
    return "write" if method in _WRITES else "read"


SCOPES: Mapping[str, str] = {
    f"/{service.full_name}/{method.name}": _scope(name, method.name)
    for name, service in pb.DESCRIPTOR.services_by_name.items()
    for method in service.methods
}
"""The scope that each RPC needs, by its full name."""


class Access:
    """Checks callers against `bearers` by token digest; without any, everybody may do everything."""

    def __init__(self, bearers: Mapping[bytes, _Bearer] | None = None) -> None:
        self._bearers = bearers

    def check(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises UnauthenticatedError without a known token, PermissionDeniedError for one without the scope."""
        needed = SCOPES.get(method)
        if self._bearers is None or needed is None:
            return
        authorization = next((str(value) for key, value in metadata if key == "authorization"), "")
        scheme, _, token = authorization.partition(" ")
        if not token or scheme.lower() != "bearer":
            raise UnauthenticatedError("a token is needed: authorization: Bearer <token>", field="authorization")
        bearer = self._bearers.get(sha256(token.strip().encode()).digest())
        if bearer is None:
            raise UnauthenticatedError("the token is not known here", field="authorization")
        if needed not in bearer.scopes:
            raise PermissionDeniedError(
                f"the token of {bearer.name} has no scope {needed}",
                field="authorization",
                value=",".join(sorted(bearer.scopes)),
                allowed=needed,
            )


def load_access(path: str | None) -> Access:
    """Tokens of the file, or no check at all without one. Raises SettingsError naming the line at fault."""
    if path is None:
        return Access()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read tokens from {path}: {error}", field="tokens_file", value=path) from error
    bearers: dict[bytes, _Bearer] = {}
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        scopes = frozenset(match[2].split(",")) if match else frozenset()
        if match is None or not scopes <= {"read", "write", "admin"}:
            raise SettingsError(
                f"{path} line {number} is no token; a line is NAME SCOPES SHA256-IN-HEX",
                field="tokens_file",
                value=path,
                allowed="scopes out of read,write,admin",
            )
        bearers[bytes.fromhex(match[3])] = _Bearer(match[1], scopes)
    if not bearers:
        raise SettingsError(f"{path} holds no token", field="tokens_file", value=path)
    return Access(bearers)
