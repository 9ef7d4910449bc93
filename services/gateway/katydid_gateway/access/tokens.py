"""JSON Web Tokens of an identity provider: signature, issuer, audience and times checked, tenant and scopes taken out.

Algorithms come from a list of one's own and never from the token alone: `none` and shared secrets are no part of it. A
token signed with a key that is not known makes the provider's keys be fetched again, at most every ten seconds, so
that keys can be rotated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import jwt
from katydid_runtime.errors import SettingsError, UnauthenticatedError

from katydid_gateway.access.scopes import ORDINARY, Identity, Scope

__all__ = ["ALGORITHMS", "TokenTerms", "TokenVerifier"]

ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
_MOST_TOKEN_BYTES = 16 * 1024
_MOST_KEYS_BYTES = 2**20
_FETCH_TIMEOUT_S = 5.0
_FETCH_PAUSE_S = 10.0
_PREFIXES = ("katydid:", "katydid.")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Whose tokens are taken, and what of them is read. `keys` is the path or https URL of a JSON Web Key Set."""

    keys: str
    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    tenant_claim: str = "sub"
    scopes_claim: str = "scope"
    clock_skew_s: float = 30.0
    refresh_s: float = 300.0

    def check(self) -> None:
        """Raises SettingsError for an algorithm or an address of keys that is not taken."""
        for name in self.algorithms:
            if name not in ALGORITHMS:
                raise SettingsError(
                    f"jwt_algorithms has {name}",
                    field="jwt_algorithms",
                    value=name,
                    allowed=", ".join(sorted(ALGORITHMS)),
                )
        address = urlsplit(self.keys)
        local = address.hostname in ("127.0.0.1", "::1", "localhost")
        if address.scheme and address.scheme != "https" and not (address.scheme == "http" and local):
            raise SettingsError(
                f"jwt_keys={self.keys} could be changed under way",
                field="jwt_keys",
                value=self.keys,
                allowed="a path or an https URL",
            )


class TokenVerifier:
    """Checks tokens against one provider's keys; `load` reads them first."""

    def __init__(self, terms: TokenTerms) -> None:
        terms.check()
        self._terms = terms
        self._keys: dict[str, jwt.PyJWK] = {}
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def load(self) -> None:
        """Raises SettingsError when there are no usable keys."""
        try:
            await self._read()
        except (OSError, ValueError, jwt.PyJWTError) as error:
            raise SettingsError(
                f"jwt_keys={self._terms.keys} gives no keys: {error}", field="jwt_keys", value=self._terms.keys
            ) from error

    async def identity(self, token: str) -> Identity:
        """Raises UnauthenticatedError, which does not say what of the token was right."""
        if len(token) > _MOST_TOKEN_BYTES:
            _refuse("it is too long")
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            _refuse("it is malformed", error)
        if header.get("alg") not in self._terms.algorithms:
            _refuse("its algorithm is not taken here")
        key = await self._key(str(header.get("kid", "")))
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(self._terms.algorithms),
                audience=self._terms.audience,
                issuer=self._terms.issuer,
                leeway=self._terms.clock_skew_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            _refuse(_reason(error), error)
        tenant = claims.get(self._terms.tenant_claim)
        if not isinstance(tenant, str) or not 0 < len(tenant) <= 256 or not tenant.isprintable():
            _refuse(f"its claim {self._terms.tenant_claim} names no tenant")
        return Identity(tenant, self._scopes(claims))

    def _scopes(self, claims: dict[str, Any]) -> frozenset[Scope]:
        """Those of ours that it names; ordinary ones when it says nothing."""
        said = claims.get(self._terms.scopes_claim)
        if said is None:
            return ORDINARY
        names = said.split() if isinstance(said, str) else said if isinstance(said, list) else []
        bare = {str(name).removeprefix(_PREFIXES[0]).removeprefix(_PREFIXES[1]) for name in names}
        return frozenset(scope for scope in Scope if scope in bare)

    async def _key(self, name: str) -> jwt.PyJWK:
        age_s = time.monotonic() - self._read_at
        if age_s > self._terms.refresh_s or (name not in self._keys and age_s > _FETCH_PAUSE_S):
            async with self._reading:
                # Whoever waited finds what the one before has read.
                if time.monotonic() - self._read_at > min(age_s, _FETCH_PAUSE_S):
                    await self._read_again()
        key = self._keys.get(name) if name else self._only_key()
        if key is None:
            _refuse("it is signed with no key that is known")
        return key

    def _only_key(self) -> jwt.PyJWK | None:
        """For providers that do not name their one key."""
        return next(iter(self._keys.values())) if len(self._keys) == 1 else None

    async def _read_again(self) -> None:
        try:
            await self._read()
        except (OSError, ValueError, jwt.PyJWTError) as error:
            self._read_at = time.monotonic()
            logger.error("keys of tokens stay as they were: %s", error)

    async def _read(self) -> None:
        content = await asyncio.to_thread(_fetched, self._terms.keys)
        keys: dict[str, jwt.PyJWK] = {}
        for entry in json.loads(content)["keys"]:
            if entry.get("kty") == "oct" or entry.get("use", "sig") != "sig":
                continue
            key = jwt.PyJWK(entry)
            keys[key.key_id or ""] = key
        if not keys:
            raise ValueError("no key for signatures")
        self._keys, self._read_at = keys, time.monotonic()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _fetched(where: str) -> bytes:
    """A file's or an address's content; redirects are not followed."""
    if not urlsplit(where).scheme:
        return Path(where).read_bytes()
    opener = urllib.request.build_opener(_NoRedirect)
    with opener.open(where, timeout=_FETCH_TIMEOUT_S) as response:
        content: bytes = response.read(_MOST_KEYS_BYTES + 1)
    if len(content) > _MOST_KEYS_BYTES:
        raise ValueError(f"more than {_MOST_KEYS_BYTES} bytes")
    return content


def _reason(error: jwt.PyJWTError) -> str:
    match error:
        case jwt.ExpiredSignatureError():
            return "it has expired"
        case jwt.ImmatureSignatureError():
            return "it is not valid yet"
        case jwt.InvalidAudienceError():
            return "it is for another audience"
        case jwt.InvalidIssuerError():
            return "it is of another issuer"
    return "its signature or claims are not valid"


def _refuse(reason: str, cause: Exception | None = None) -> NoReturn:
    raise UnauthenticatedError(f"the token is refused: {reason}", field="authorization") from cause
