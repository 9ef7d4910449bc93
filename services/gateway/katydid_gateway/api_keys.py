"""API keys, kept as SHA-256 digests: who may call, and as which tenant.

A file has one key a line, `NAME DIGEST`, the digest in hex; `#` begins a comment. Keys are long random strings, so a
plain digest is enough; looking the digest up takes the same time whatever the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from katydid_runtime.errors import SettingsError, UnauthenticatedError

__all__ = ["ApiKeys", "load_api_keys"]

_LINE = re.compile(r"(\S+)\s+([0-9a-fA-F]{64})")


class ApiKeys:
    """Tenant names by key digest; without any, every caller is the tenant ""."""

    def __init__(self, tenants: Mapping[bytes, str] | None = None) -> None:
        self._tenants = tenants

    def tenant(self, authorization: str) -> str:
        """Whose key `Bearer <key>` is. Raises UnauthenticatedError."""
        if self._tenants is None:
            return ""
        scheme, _, key = authorization.partition(" ")
        if not key or scheme.lower() != "bearer":
            raise UnauthenticatedError("an API key is needed: Authorization: Bearer <key>", field="authorization")
        tenant = self._tenants.get(sha256(key.strip().encode()).digest())
        if tenant is None:
            raise UnauthenticatedError("the API key is not known here", field="authorization")
        return tenant


def load_api_keys(path: str | None) -> ApiKeys:
    """Keys of the file, or no check at all without one. Raises SettingsError naming the line at fault."""
    if path is None:
        return ApiKeys()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read API keys from {path}: {error}", field="api_keys_file", value=path) from error
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise SettingsError(
                f"{path} line {number} is no key; a line is NAME SHA256-IN-HEX", field="api_keys_file", value=path
            )
        tenants[bytes.fromhex(match[2])] = match[1]
    if not tenants:
        raise SettingsError(f"{path} holds no key", field="api_keys_file", value=path)
    return ApiKeys(tenants)
