"""Engines are added where the list allows, and nowhere that only the gateway can reach."""

from __future__ import annotations

import asyncio
import socket

import pytest
from katydid_gateway.access.registration import EngineAllowList
from katydid_runtime.errors import InvalidRequestError, PermissionDeniedError

LIST = EngineAllowList(("10.0.0.0/8", "fd00::/8", "2002::/16", "64:ff9b::/32", "0.0.0.0/0"), "9000-9999")
LOCAL = EngineAllowList(("127.0.0.0/8",), "1-65535")


def resolved(allowed: EngineAllowList, address: str) -> str:
    return asyncio.run(allowed.resolved(address))


def test_what_is_allowed() -> None:
    assert resolved(LIST, "10.1.2.3:9000") == "10.1.2.3:9000"
    assert resolved(LIST, "[fd00::1]:9999") == "[fd00::1]:9999"
    assert resolved(LOCAL, "127.0.0.1:80") == "127.0.0.1:80"


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254:9000", "[fe80::1]:9000", "[::ffff:169.254.169.254]:9000", "127.0.0.1:9000", "[::1]:9000",
        "0.0.0.0:9000", "224.0.0.1:9000", "255.255.255.255:9000", "[fc01::1]:9000", "10.1.2.3:80", "10.1.2.3:8999",
        "0x7f.1:9000", "2130706433:9000", "[2002:a9fe:a9fe::1]:9000", "[2002:7f00:1::]:9000",
        "[fd00:ec2::254]:9000", "[fd20:ce::254]:9000", "100.100.100.200:9000", "168.63.129.16:9000",
        "[64:ff9b::a9fe:a9fe]:9000", "[64:ff9b::7f00:1]:9000", "[64:ff9b::6464:64c8]:9000",
    ],
)  # fmt: skip
def test_what_is_refused(address: str) -> None:
    with pytest.raises((PermissionDeniedError, InvalidRequestError)):
        resolved(LIST, address)


def test_a_name_is_as_good_as_the_worst_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("10.0.0.1", "127.0.0.1")]

    async def scenario() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
        with pytest.raises(PermissionDeniedError, match=r"127\.0\.0\.1"):
            await LIST.resolved("rebound.example:9000")

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["", "nothing", "host:", "host:99999", "unix:/run/x", "http://10.0.0.1:9000/"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises((InvalidRequestError, PermissionDeniedError)):
        resolved(LIST, address)


def test_without_networks_nothing_can_be_added() -> None:
    with pytest.raises(PermissionDeniedError, match="no network"):
        resolved(EngineAllowList((), "1-65535"), "10.0.0.1:9000")
