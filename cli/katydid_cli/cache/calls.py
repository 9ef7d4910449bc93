"""The commands of `katydid cache`: calls to running services, printed as tables or JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from katydid_cache import BlockInfo, CacheAdmin, CacheClient, CacheStats, Instances, NamespaceInfo, Tls
from katydid_runtime.errors import DeadlineExceededError, InvalidRequestError, NotFoundError, UnavailableError
from katydid_runtime.tls import client_tls
from rich.console import Console
from rich.live import Live
from rich.table import Table

from katydid_cli.cache.figures import (
    SPEEDS_HEAD,
    TENANTS_HEAD,
    TIERS_HEAD,
    TOP_HEAD,
    WHAT_IF_HEAD,
    bytes_text,
    counted,
    jsonable,
    speed_rows,
    tenant_rows,
    tier_rows,
    top_row,
    what_if_rows,
)

__all__ = ["Target", "evict", "flush", "ls", "pin", "stats", "top", "verify"]

T = TypeVar("T")

_HASH_HEX = 64
_IDENTITY_DIGITS = 4
_PIPED_COLUMNS = 240


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Which services: `source` as of `Instances`; how to get in; whether to print JSON."""

    source: str
    token: str | None
    ca_file: Path | None
    as_json: bool

    def tls(self) -> Tls | None:
        return client_tls(None if self.ca_file is None else str(self.ca_file), None)


def stats(target: Target) -> None:
    """Figures of every instance. Raises what some failed with, once those of the others are printed."""

    async def run() -> None:
        async with _clients(target) as clients:
            asked = (client.stats(timeout_s=5.0) for client in clients.values())
            found = dict(zip(clients, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        there = {name: each for name, each in found.items() if isinstance(each, CacheStats)}
        if there and target.as_json:
            _print_json({name: jsonable(each) for name, each in there.items()})
        elif there:
            for name, each in there.items():
                _print_stats(name, each)
        failures = [each for each in found.values() if isinstance(each, BaseException)]
        if len(failures) > 1:
            raise UnavailableError("; ".join(map(str, failures)))
        if failures:
            raise failures[0]

    _run(run())


def ls(target: Target, namespace: str | None, limit: int) -> None:
    """Namespaces, or the first `limit` blocks of one."""

    async def run() -> None:
        async with _admin(target) as admin:
            if namespace is None:
                spaces = await admin.namespaces()
                if target.as_json:
                    _print_json([jsonable(space) for space in spaces])
                    return
                rows = [
                    (
                        space.identity.hex()[:16],
                        str(space.blocks),
                        bytes_text(space.blocks * space.layout.block_bytes),
                        bytes_text(space.layout.block_bytes),
                        f"{space.layout.layers} x {space.layout.kv_heads} x {space.layout.head_dim}",
                        space.layout.dtype,
                        str(space.attachments),
                    )
                    for space in spaces
                ]
                head = ("namespace", "blocks", "bytes", "a block", "layers x heads x dim", "dtype", "clients")
                _print_table(head, rows)
                return
            identity = (await _namespace(admin, namespace)).identity
            blocks: list[BlockInfo] = []
            async for block in admin.blocks(identity):
                if len(blocks) == limit:
                    break
                blocks.append(block)
            if target.as_json:
                _print_json([jsonable(block) for block in blocks])
                return
            now = time.time()
            _print_table(
                ("block", "after", "tiers", "bytes", "pins", "expires in"),
                [
                    (
                        block.hash.hex(),
                        block.parent.hex()[:16] or "-",
                        "+".join(tier.name.lower() for tier in block.tiers),
                        bytes_text(block.bytes),
                        str(block.pins),
                        f"{block.expires_at - now:.0f} s" if block.expires_at else "-",
                    )
                    for block in blocks
                ],
            )

    _run(run())


def evict(target: Target, namespace: str, hashes: Sequence[str]) -> None:
    """Drop blocks, all of the namespace when none is named."""
    packed = _packed(hashes)
    left = "not there or in use"
    _count(target, "evicted", lambda admin, space: admin.evict(space.identity, packed), namespace, len(hashes), left)


def pin(target: Target, namespace: str, hashes: Sequence[str], hold_s: float) -> None:
    """Keep blocks for `hold_s`, 0: no longer."""
    packed = _packed(hashes)
    what = "pinned" if hold_s else "unpinned"
    _count(target, what, lambda admin, space: admin.pin(space.identity, packed, hold_s), namespace, len(hashes))


def flush(target: Target, timeout_s: float) -> None:
    """Write down to disk what is in memory alone."""

    async def run() -> None:
        async with _admin(target) as admin:
            written = await admin.flush(timeout_s=timeout_s)
        _print_json({"written": written}) if target.as_json else print(f"{counted(written, 'block')} written")

    _run(run())


def verify(target: Target, timeout_s: float) -> bool:
    """Read and check everything; True when all of it could be read and was right."""

    async def run() -> bool:
        async with _admin(target) as admin:
            result = await admin.verify(timeout_s=timeout_s)
        if target.as_json:
            _print_json(dataclasses.asdict(result))
        else:
            unreadable = f", {result.unreadable} unreadable" if result.unreadable else ""
            print(f"{counted(result.blocks, 'block')} read, {result.corrupt} corrupt{unreadable}")
        return not result.corrupt and not result.unreadable

    return _run(run())


def top(target: Target, interval_s: float, count: int) -> None:
    """Rates of every instance, again and again, `count` times (0: until interrupted)."""

    async def run() -> None:
        before: dict[str, CacheStats] = {}
        at = time.monotonic()
        async with _clients(target) as clients:
            console = Console(highlight=False, markup=False)
            with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
                looks = 0
                while True:
                    found = await asyncio.gather(*(_look(client) for client in clients.values()))
                    now = time.monotonic()
                    rows = [
                        (name, *["-"] * (len(TOP_HEAD) - 2), "away")
                        if each is None
                        else top_row(name, before.get(name), each, now - at)
                        for name, each in zip(clients, found, strict=True)
                    ]
                    before = {name: each for name, each in zip(clients, found, strict=True) if each is not None}
                    at = now
                    looks += 1
                    if target.as_json:
                        print(json.dumps([dict(zip(TOP_HEAD, row, strict=True)) for row in rows]), flush=True)
                    elif live is None:
                        _print_table(TOP_HEAD, rows)
                    else:
                        live.update(_table(TOP_HEAD, rows), refresh=True)
                    if looks == count:
                        return
                    await asyncio.sleep(interval_s)

    _run(run())


async def _look(client: CacheClient) -> CacheStats | None:
    try:
        return await client.stats(timeout_s=1.0)
    except (UnavailableError, DeadlineExceededError):
        return None


def _count(
    target: Target,
    what: str,
    call: Callable[[CacheAdmin, NamespaceInfo], Coroutine[Any, Any, int]],
    namespace: str,
    asked: int,
    left: str = "not there",
) -> None:
    """Print of how many blocks `call` did `what`, and of those `asked` for by name why some are `left`."""

    async def run() -> None:
        async with _admin(target) as admin:
            blocks = await call(admin, await _namespace(admin, namespace))
        if target.as_json:
            _print_json({what: blocks})
            return
        print(f"{counted(blocks, 'block')} {what}{f', {asked - blocks} {left}' if blocks < asked else ''}")

    _run(run())


async def _namespace(admin: CacheAdmin, digits: str) -> NamespaceInfo:
    """The namespace whose identity begins with `digits` of hex."""
    if len(digits) < _IDENTITY_DIGITS:
        raise InvalidRequestError(
            f"{digits!r} is too short for a namespace: at least {_IDENTITY_DIGITS} digits",
            field="namespace",
            value=digits,
            allowed=f"at least {_IDENTITY_DIGITS} digits of one that `katydid cache ls` shows",
        )
    found = [space for space in await admin.namespaces() if space.identity.hex().startswith(digits.lower())]
    if len(found) != 1:
        raise NotFoundError(
            f"{len(found)} namespaces begin with {digits!r}; `katydid cache ls` shows all",
            field="namespace",
            value=digits,
            allowed="the first digits of exactly one",
        )
    return found[0]


def _packed(hashes: Sequence[str]) -> bytes:
    for name in hashes:
        if len(name) != _HASH_HEX or not all(digit in "0123456789abcdefABCDEF" for digit in name):
            raise InvalidRequestError(
                f"{name!r} is no block: a hash has {_HASH_HEX} digits of hex",
                field="hash",
                value=name,
                allowed=f"{_HASH_HEX} digits of hex",
            )
    return b"".join(map(bytes.fromhex, hashes))


@asynccontextmanager
async def _clients(target: Target) -> AsyncIterator[dict[str, CacheClient]]:
    """A client of each instance, by address."""
    instances = Instances(target.source)
    await instances.refresh()
    if not instances.addresses:
        raise UnavailableError(f"{target.source} names no cache service")
    tls = target.tls()
    async with AsyncExitStack() as stack:
        clients = {}
        for name in instances.addresses:
            client = CacheClient(name, name="katydid cache", tls=tls, token=target.token)
            clients[name] = await stack.enter_async_context(client)
        yield clients


@asynccontextmanager
async def _admin(target: Target) -> AsyncIterator[CacheAdmin]:
    """The AdminService of the one service meant."""
    instances = Instances(target.source)
    await instances.refresh()
    if len(instances.addresses) != 1:
        raise InvalidRequestError(
            f"{target.source} names {len(instances.addresses)} services; this command is for one",
            field="address",
            value=target.source,
            allowed="one service for what changes or lists it",
        )
    async with CacheAdmin(instances.addresses[0], tls=target.tls(), token=target.token) as admin:
        yield admin


def _print_stats(name: str, stats: CacheStats) -> None:
    print(
        f"{name}: {counted(stats.attachments, 'client')}, {counted(stats.leases, 'lease')}, "
        f"{counted(stats.reservations, 'reservation')}, {counted(stats.quarantined, 'slot')} in quarantine, "
        f"{counted(stats.pulled, 'block')} pulled"
    )
    _print_table(TIERS_HEAD, tier_rows(stats))
    for head, rows in (
        (TENANTS_HEAD, tenant_rows(stats)),
        (WHAT_IF_HEAD, what_if_rows(stats)),
        (SPEEDS_HEAD, speed_rows(stats)),
    ):
        if rows:
            print()
            _print_table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    # A table that is piped somewhere is not cut to the width of a terminal that is not there.
    width = None if sys.stdout.isatty() else _PIPED_COLUMNS
    Console(highlight=False, markup=False, width=width).print(_table(head, rows))


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
