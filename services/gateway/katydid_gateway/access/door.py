"""The one place where callers are told apart: by API key or token, checked for a scope, held to their share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from katydid_runtime.errors import KatydidError, PermissionDeniedError, UnauthenticatedError

from katydid_gateway.access.places import Places
from katydid_gateway.access.scopes import Identity, Scope
from katydid_gateway.access.tokens import TokenVerifier
from katydid_gateway.api_keys import ApiKeys
from katydid_gateway.flow.budgets import TenantTerms

__all__ = ["Door"]

_EVERYBODY = Identity("", frozenset(Scope))


class Door:
    """Without keys and tokens every caller is the tenant "" and may do everything.

    `shares` is how many gateway processes serve the same tenants: each grants its part of what a tenant was given.
    `on_refused` is called with the error of every caller that is turned away.
    """

    def __init__(
        self,
        keys: ApiKeys,
        tokens: TokenVerifier | None = None,
        *,
        max_requests: int = 4096,
        per_tenant: int = 0,
        shares: int = 1,
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._per_tenant = per_tenant
        self._shares = shares
        self.on_refused: Callable[[KatydidError], object] = lambda _error: None
        self._places = Places(max_requests, self._limit, lambda error: self.on_refused(error))

    @property
    def open(self) -> bool:
        """Whether anybody may come in."""
        return not self._keys.known and self._tokens is None

    async def tenant(self, authorization: str, scope: Scope | None) -> str:
        """Who calls; any scope will do when None.

        Raises UnauthenticatedError for a stranger, PermissionDeniedError for one who may not do it.
        """
        try:
            identity = await self._identity(authorization)
            if scope is not None and scope not in identity.scopes:
                raise PermissionDeniedError(
                    f"this needs the scope {scope}", field="authorization", allowed=", ".join(sorted(identity.scopes))
                )
        except KatydidError as error:
            self.on_refused(error)
            raise
        return identity.tenant

    def place(self, tenant: str) -> AbstractContextManager[None]:
        """A request's place while it is in flight. Raises OverloadedError, QuotaExceededError."""
        return self._places.one(tenant)

    def more_places(self, count: int) -> AbstractContextManager[None]:
        """Places of a request's prompts beyond its first. Raises OverloadedError."""
        return self._places.more(count)

    def terms(self, tenant: str) -> TenantTerms:
        """What this process grants the tenant."""
        terms = self._keys.terms(tenant)
        if self._shares == 1 or terms.tokens_per_minute is None:
            return terms
        return replace(terms, tokens_per_minute=max(1, terms.tokens_per_minute // self._shares))

    async def _identity(self, authorization: str) -> Identity:
        if self.open:
            return _EVERYBODY
        scheme, _, secret = authorization.partition(" ")
        secret = secret.strip()
        if not secret or scheme.lower() != "bearer":
            raise UnauthenticatedError("an API key is needed: Authorization: Bearer <key>", field="authorization")
        known = self._keys.identity(secret)
        if known is not None:
            return known
        if self._tokens is not None and secret.count(".") == 2:
            return await self._tokens.identity(secret)
        raise UnauthenticatedError("the API key is not known here", field="authorization")

    def _limit(self, tenant: str) -> int | None:
        most = self._keys.terms(tenant).concurrency or self._per_tenant
        return max(1, -(-most // self._shares)) if most else None
