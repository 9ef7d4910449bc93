"""Which addresses engines may be added at: an allow-list of networks and ports, so that nobody makes the gateway call
what only it can reach.

A name is resolved once, every address it has must be allowed, and the first is connected to from then on: what it means
later changes nothing. Addresses where clouds keep their metadata, link-local ones and those that are no host's are
refused whatever the list says, loopback unless a network of the list lies within it. gRPC follows no redirects.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from katydid_runtime.errors import InvalidRequestError, PermissionDeniedError, SettingsError
from katydid_runtime.exposition import split_address

__all__ = ["EngineAllowList"]

_RESOLVE_TIMEOUT_S = 5.0
# Metadata and credentials of clouds outside of link-local networks: AWS (instances, EKS), Google Cloud, Alibaba Cloud,
# Azure, Oracle Cloud.
_METADATA = frozenset(
    map(
        ip_address,
        ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
# Networks whose addresses end with an IPv4 address, to which a gateway of the network leads.
_NAT64 = (ip_network("64:ff9b::/96"), ip_network("64:ff9b:1::/48"))


class EngineAllowList:
    """`networks` as 10.0.0.0/8, `ports` as FIRST-LAST."""

    def __init__(self, networks: Sequence[str], ports: str) -> None:
        self._networks = [ip_network(network) for network in networks]
        first, _, last = ports.partition("-")
        self._ports = range(int(first), int(last) + 1)

    async def resolved(self, address: str) -> str:
        """The address to connect to. Raises PermissionDeniedError for one that is not allowed, InvalidRequestError."""
        if not self._networks:
            raise PermissionDeniedError(
                "engines cannot be added: engine_networks names no network",
                field="address",
                value=address,
                allowed="none",
            )
        try:
            host, port = split_address(address)
        except SettingsError as error:
            raise InvalidRequestError(error.message, field="address", value=address, allowed="host:port") from error
        if port not in self._ports:
            raise PermissionDeniedError(
                f"port {port} is not allowed",
                field="address",
                value=address,
                allowed=f"ports {self._ports.start}-{self._ports.stop - 1}",
            )
        found = await _addresses(host, address)
        for each in found:
            if reason := self._objection(each):
                raise PermissionDeniedError(
                    f"{address} is {each}, {reason}",
                    field="address",
                    value=address,
                    allowed=", ".join(map(str, self._networks)),
                )
        chosen = found[0]
        return f"[{chosen}]:{port}" if chosen.version == 6 else f"{chosen}:{port}"

    def _objection(self, address: IPv4Address | IPv6Address) -> str:
        if isinstance(address, IPv6Address):
            # What carries an IPv4 address (mapped, 6to4, NAT64) leads there.
            nat64 = any(address in network for network in _NAT64)
            carried = IPv4Address(int(address) & 0xFFFFFFFF) if nat64 else address.ipv4_mapped or address.sixtofour
            address = carried or address
        if address in _METADATA:
            return "where a cloud keeps its metadata"
        if address.is_link_local:
            return "a link-local address"
        if address.is_multicast or address.is_unspecified or (address.is_reserved and not address.is_loopback):
            return "no address of a host"
        holders = [network for network in self._networks if address in network]
        if not holders:
            return "in no network that is allowed"
        if address.is_loopback and not any(network.is_loopback for network in holders):
            return "a loopback address"
        return ""


async def _addresses(host: str, address: str) -> list[IPv4Address | IPv6Address]:
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (TimeoutError, OSError, UnicodeError) as error:
        raise InvalidRequestError(f"{host} has no address", field="address", value=address) from error
    return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
