"""`katydid cache` and its options; what the commands do is imported when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["cache_app"]

cache_app = typer.Typer(help="Look into running KV-cache services, and change what they keep.")

Source = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="KATYDID_CACHE_ADDRESS",
        help="gRPC address; for stats and top also several, dns:NAME:PORT or file:PATH.",
    ),
]
Token = Annotated[
    str | None, typer.Option(envvar="KATYDID_CACHE_TOKEN", help="Bearer token, if the service asks for one.")
]
CaFile = Annotated[Path | None, typer.Option(help="PEM authority of the service: speak TLS.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespace = Annotated[str, typer.Argument(help="First digits of a namespace that `katydid cache ls` shows.")]
DEFAULT = "127.0.0.1:7301"
_YEAR_S = 365 * 86_400.0


@cache_app.command()
def stats(source: Source = DEFAULT, token: Token = None, tls_ca_file: CaFile = None, as_json: AsJson = False) -> None:
    """Show sizes, hits, failures and measured speeds."""
    from katydid_cli.cache import calls

    calls.stats(calls.Target(source, token, tls_ca_file, as_json))


@cache_app.command()
def ls(
    namespace: Annotated[str | None, typer.Argument(help="Show the blocks of this namespace.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most blocks shown.")] = 100,
    source: Source = DEFAULT,
    token: Token = None,
    tls_ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """List namespaces, or the blocks of one."""
    from katydid_cli.cache import calls

    calls.ls(calls.Target(source, token, tls_ca_file, as_json), namespace, limit)


@cache_app.command()
def evict(
    namespace: Namespace,
    hashes: Annotated[list[str] | None, typer.Argument(help="Blocks, in hex.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop all blocks of the namespace.")] = False,
    source: Source = DEFAULT,
    token: Token = None,
    tls_ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Drop blocks from every tier; those in use stay."""
    if bool(hashes) == everything:
        raise typer.BadParameter("name blocks, or say --all")
    from katydid_cli.cache import calls

    calls.evict(calls.Target(source, token, tls_ca_file, as_json), namespace, hashes or ())


@cache_app.command()
def pin(
    namespace: Namespace,
    hashes: Annotated[list[str], typer.Argument(help="Blocks, in hex.")],
    hold_s: Annotated[float, typer.Option(min=0, max=_YEAR_S, help="How long, in seconds; 0 ends it.")] = 3600.0,
    source: Source = DEFAULT,
    token: Token = None,
    tls_ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Keep blocks from being evicted for a time."""
    from katydid_cli.cache import calls

    calls.pin(calls.Target(source, token, tls_ca_file, as_json), namespace, hashes, hold_s)


@cache_app.command()
def flush(
    timeout_s: Annotated[float, typer.Option(min=0.1, max=_YEAR_S, help="Longest wait, in seconds.")] = 300.0,
    source: Source = DEFAULT,
    token: Token = None,
    tls_ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Write to disk what is in memory alone."""
    from katydid_cli.cache import calls

    calls.flush(calls.Target(source, token, tls_ca_file, as_json), timeout_s)


@cache_app.command()
def verify(
    timeout_s: Annotated[float, typer.Option(min=0.1, max=_YEAR_S, help="Longest wait, in seconds.")] = 3600.0,
    source: Source = DEFAULT,
    token: Token = None,
    tls_ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Read every copy of every block and check it; exit code 1 when one was corrupt or could not be read."""
    from katydid_cli.cache import calls

    intact = calls.verify(calls.Target(source, token, tls_ca_file, as_json), timeout_s)
    raise typer.Exit(0 if intact else 1)


@cache_app.command()
def top(
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Looks; 0: until Ctrl-C.")] = 0,
    source: Source = DEFAULT,
    token: Token = None,
    tls_ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Watch the rates of all instances."""
    from katydid_cli.cache import calls

    calls.top(calls.Target(source, token, tls_ca_file, as_json), interval_s, count)
