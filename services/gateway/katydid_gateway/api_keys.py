"""API keys, kept as SHA-256 digests: who may call, as which tenant, and on what terms.

A file has one key a line, `NAME DIGEST [weight=N] [tokens_per_minute=N] [concurrency=N] [scopes=A,B]`, the digest in
hex; `#` begins a comment. Terms of a tenant with several keys are those of its last line; scopes are each key's own.
The file is read again when it changes; one that cannot be used is logged, and the keys stay as they were. Keys are long
random strings, so a plain digest is enough; looking the digest up takes the same time whatever the key.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from katydid_runtime.errors import SettingsError

from katydid_gateway.access.scopes import ORDINARY, Identity, Scope, scopes_of
from katydid_gateway.flow.budgets import TenantTerms

__all__ = ["ApiKeys", "KeyFile", "load_api_keys"]

_LINE = re.compile(r"(\S+)\s+([0-9a-fA-F]{64})((?:\s+\S+)*)")
_LOOK_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What a file says: who has a key, by its digest, and terms by tenant name."""

    keys: Mapping[bytes, Identity]
    terms: Mapping[str, TenantTerms] = field(default_factory=dict)


class ApiKeys:
    """Keys of a file, or none."""

    def __init__(self, content: KeyFile | None = None, path: Path | None = None) -> None:
        self._content = content
        self._path = path
        self._stamp = _stamp(path)
        self._looked_at = time.monotonic()

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return self._content is not None

    def identity(self, key: str) -> Identity | None:
        """Whose key it is; None for one that is not known."""
        if self._content is None:
            return None
        self._refresh()
        return self._content.keys.get(sha256(key.encode()).digest())

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
            logger.info("API keys were read again", extra={"keys": len(self._content.keys)})


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
    keys: dict[bytes, Identity] = {}
    terms: dict[str, TenantTerms] = {}
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise _unusable(path, f"{path} line {number} is no key; a line is NAME SHA256-IN-HEX [weight=N] ...")
        words = match[3].split()
        scoped = [word for word in words if word.startswith("scopes=")]
        keys[bytes.fromhex(match[2])] = Identity(match[1], _scopes(path, number, scoped[-1]) if scoped else ORDINARY)
        if rest := [word for word in words if word not in scoped]:
            terms[match[1]] = _terms(path, number, rest)
    if not keys:
        raise _unusable(path, f"{path} holds no key")
    return KeyFile(keys, terms)


def _scopes(path: Path, number: int, word: str) -> frozenset[Scope]:
    try:
        return scopes_of(word.removeprefix("scopes=").split(","))
    except ValueError as error:
        raise _unusable(path, f"{path} line {number}: {error}; allowed: {', '.join(Scope)}") from None


def _terms(path: Path, number: int, words: list[str]) -> TenantTerms:
    weight = 1.0
    tokens = concurrency = None
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
        elif name == "concurrency" and value >= 1 and value.is_integer():
            concurrency = int(value)
        else:
            allowed = "weight=N with N > 0, tokens_per_minute=N and concurrency=N with a whole N >= 1, scopes=A,B"
            raise _unusable(path, f"{path} line {number}: {word!r} is no term; allowed: {allowed}")
    return TenantTerms(weight, tokens, concurrency)


def _unusable(path: Path, message: str) -> SettingsError:
    return SettingsError(message, field="api_keys_file", value=str(path))
