"""API keys, kept as SHA-256 digests: who may call, as which tenant, and on what terms.

A file has one key a line, `NAME DIGEST [weight=N] [tokens_per_minute=N]`, the digest in hex; `#` begins a comment.
Terms of a tenant with several keys are those of its last line. The file is read again when it changes; one that cannot
be used is logged, and the keys stay as they were. Keys are long random strings, so a plain digest is enough; looking
the digest up takes the same time whatever the key.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from katydid_runtime.errors import SettingsError, UnauthenticatedError

from katydid_gateway.flow.budgets import TenantTerms

__all__ = ["ApiKeys", "KeyFile", "load_api_keys"]

_LINE = re.compile(r"(\S+)\s+([0-9a-fA-F]{64})((?:\s+\S+)*)")
_LOOK_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What a file says: tenant names by key digest, and terms by tenant name."""

    tenants: Mapping[bytes, str]
    terms: Mapping[str, TenantTerms] = field(default_factory=dict)


class ApiKeys:
    """Keys of a file; without any, every caller is the tenant ""."""

    def __init__(self, content: KeyFile | None = None, path: Path | None = None) -> None:
        self._content = content
        self._path = path
        self._stamp = _stamp(path)
        self._looked_at = time.monotonic()

    def tenant(self, authorization: str) -> str:
        """Whose key `Bearer <key>` is. Raises UnauthenticatedError."""
        if self._content is None:
            return ""
        self._refresh()
        scheme, _, key = authorization.partition(" ")
        if not key or scheme.lower() != "bearer":
            raise UnauthenticatedError("an API key is needed: Authorization: Bearer <key>", field="authorization")
        tenant = self._content.tenants.get(sha256(key.strip().encode()).digest())
        if tenant is None:
            raise UnauthenticatedError("the API key is not known here", field="authorization")
        return tenant

    def terms(self, tenant: str) -> TenantTerms:
        """What the tenant was given; the same for all that nothing was said of."""
        return _ORDINARY if self._content is None else self._content.terms.get(tenant, _ORDINARY)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._content = _read(self._path)
        except SettingsError as error:
            logger.error("API keys stay as they were: %s", error.message)
        else:
            logger.info("API keys were read again", extra={"keys": len(self._content.tenants)})


_ORDINARY = TenantTerms()


def load_api_keys(path: str | None) -> ApiKeys:
    """Keys of the file, or no check at all without one. Raises SettingsError naming the line at fault."""
    return ApiKeys() if path is None else ApiKeys(_read(Path(path)), Path(path))


def _stamp(path: Path | None) -> tuple[int, int] | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size)


def _read(path: Path) -> KeyFile:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, f"cannot read API keys from {path}: {error}") from error
    tenants: dict[bytes, str] = {}
    terms: dict[str, TenantTerms] = {}
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise _unusable(path, f"{path} line {number} is no key; a line is NAME SHA256-IN-HEX [weight=N] ...")
        tenants[bytes.fromhex(match[2])] = match[1]
        if match[3].strip():
            terms[match[1]] = _terms(path, number, match[3].split())
    if not tenants:
        raise _unusable(path, f"{path} holds no key")
    return KeyFile(tenants, terms)


def _terms(path: Path, number: int, words: list[str]) -> TenantTerms:
    weight, tokens = 1.0, None
    for word in words:
        name, _, text = word.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name == "weight" and 0 < value <= 1e6:
            weight = value
        elif name == "tokens_per_minute" and value >= 1 and value.is_integer():
            tokens = int(value)
        else:
            allowed = "weight=N with N > 0, tokens_per_minute=N with a whole N >= 1"
            raise _unusable(path, f"{path} line {number}: {word!r} is no term; allowed: {allowed}")
    return TenantTerms(weight, tokens)


def _unusable(path: Path, message: str) -> SettingsError:
    return SettingsError(message, field="api_keys_file", value=str(path))
