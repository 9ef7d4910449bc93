"""Who is let in, for what, and how many at a time."""

from __future__ import annotations

import asyncio
from hashlib import sha256

import pytest
from katydid_gateway.access.door import Door
from katydid_gateway.access.scopes import ORDINARY, Identity, Scope
from katydid_gateway.api_keys import ApiKeys, KeyFile
from katydid_gateway.flow.budgets import TenantTerms
from katydid_runtime.errors import (
    OverloadedError,
    PermissionDeniedError,
    QuotaExceededError,
    UnauthenticatedError,
)

KEYS = ApiKeys(
    KeyFile(
        {sha256(b"k1").digest(): Identity("a"), sha256(b"k2").digest(): Identity("ops", frozenset({Scope.ADMIN}))},
        {"a": TenantTerms(tokens_per_minute=1000, concurrency=2)},
    )
)


def tenant(door: Door, authorization: str, scope: Scope | None = Scope.INFERENCE) -> str:
    return asyncio.run(door.tenant(authorization, scope))


def test_keys_and_scopes() -> None:
    door = Door(KEYS)
    assert not door.open
    assert tenant(door, "Bearer k1") == tenant(door, "bearer k1 ") == "a"
    assert tenant(door, "Bearer k2", Scope.ADMIN) == tenant(door, "Bearer k2", None) == "ops"
    for scope in set(Scope) - ORDINARY:
        with pytest.raises(PermissionDeniedError):
            tenant(door, "Bearer k1", scope)
    with pytest.raises(PermissionDeniedError):
        tenant(door, "Bearer k2")
    for wrong in ("", "Bearer", "Bearer ", "Bearer k3", "Basic k1", "k1", "Bearer a.b.c"):
        with pytest.raises(UnauthenticatedError):
            tenant(door, wrong, None)


def test_without_keys_everyone_may_do_everything() -> None:
    door = Door(ApiKeys())
    assert door.open
    assert all(tenant(door, "", scope) == "" for scope in Scope)


def test_places_are_limited_and_given_back() -> None:
    door = Door(KEYS, max_requests=3, per_tenant=1)
    refused: list[str] = []
    door.on_refused = lambda error: refused.append(error.reason)
    with door.place("a"), door.place("a"):
        with pytest.raises(QuotaExceededError) as caught, door.place("a"):
            pass
        assert (caught.value.field, caught.value.retry_after_s) == ("concurrency", 1.0)
        with door.place("ops"):
            with pytest.raises(OverloadedError), door.place("b"):
                pass
            with pytest.raises(OverloadedError), door.place("a"):
                pass
    with pytest.raises(ZeroDivisionError), door.place("ops"):
        raise ZeroDivisionError
    with door.place("ops"), pytest.raises(QuotaExceededError), door.place("ops"):
        pass
    with door.place("ops"):
        with door.more_places(2), pytest.raises(OverloadedError), door.place("a"):
            pass
        with pytest.raises(OverloadedError), door.more_places(3):
            pass
    assert door._places.in_use == 0
    assert not door._places._taken
    assert refused == ["QUOTA_EXCEEDED", *["OVERLOADED"] * 2, "QUOTA_EXCEEDED", *["OVERLOADED"] * 2]


def test_several_processes_divide_what_a_tenant_has() -> None:
    door = Door(KEYS, shares=4)
    assert door.terms("a").tokens_per_minute == 250
    assert door.terms("b") == TenantTerms()
    with door.place("a"), pytest.raises(QuotaExceededError), door.place("a"):
        pass
