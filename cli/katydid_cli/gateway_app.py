"""`katydid gateway`: a running gateway's posture and engines, through its AdminService."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["gateway_app"]

gateway_app = typer.Typer(help="Look into a running gateway, and change it: needs its admin_listen.")

Address = Annotated[str, typer.Option(envvar="KATYDID_ADMIN_ADDRESS", help="gRPC address of its AdminService.")]
ApiKey = Annotated[str | None, typer.Option(envvar="KATYDID_API_KEY", help="Key or token with the scope admin.")]
CaFile = Annotated[Path | None, typer.Option(help="PEM authority of the gateway: speak TLS.")]
DEFAULT = "127.0.0.1:8002"
_TIMEOUT_S = 10.0


@gateway_app.command()
def posture(address: Address = DEFAULT, api_key: ApiKey = None, tls_ca_file: CaFile = None) -> None:
    """Show what is open, unauthenticated or unencrypted, and how to close it; exit code 1 when something is."""
    findings = _call("GetPosture", address, api_key, tls_ca_file).findings
    for finding in findings:
        remedy = f"\n{'':<24}close it: {finding.remedy}" if finding.open else ""
        typer.echo(f"{'OPEN' if finding.open else 'ok':<6}{finding.subject:<18}{finding.state}{remedy}")
    if any(finding.open for finding in findings):
        raise typer.Exit(1)


@gateway_app.command()
def engines(address: Address = DEFAULT, api_key: ApiKey = None, tls_ca_file: CaFile = None) -> None:
    """List the engines it knows, and why some get no requests."""
    for engine in _call("ListEngines", address, api_key, tls_ca_file).engines:
        state = engine.excluded or "takes requests"
        typer.echo(f"{engine.name:<24}{engine.address:<24}{engine.in_flight:>6} in flight  {state}")


@gateway_app.command("add-engine")
def add_engine(
    engine: Annotated[str, typer.Argument(help="ADDRESS or NAME=ADDRESS, within engine_networks and engine_ports.")],
    address: Address = DEFAULT,
    api_key: ApiKey = None,
    tls_ca_file: CaFile = None,
) -> None:
    """Add an engine."""
    name, separator, where = engine.partition("=")
    fields = {"name": name, "address": where} if separator else {"address": engine}
    typer.echo(f"added, at {_call('AddEngine', address, api_key, tls_ca_file, **fields).address}")


@gateway_app.command("remove-engine")
def remove_engine(
    name: Annotated[str, typer.Argument(help="As `katydid gateway engines` shows it.")],
    address: Address = DEFAULT,
    api_key: ApiKey = None,
    tls_ca_file: CaFile = None,
) -> None:
    """Leave an engine; its requests go on elsewhere."""
    _call("RemoveEngine", address, api_key, tls_ca_file, name=name)


@gateway_app.command()
def drain(
    resume: Annotated[bool, typer.Option("--resume", help="Take requests again.")] = False,
    address: Address = DEFAULT,
    api_key: ApiKey = None,
    tls_ca_file: CaFile = None,
) -> None:
    """Refuse new requests; those in flight go on."""
    answer = _call("SetDraining", address, api_key, tls_ca_file, draining=not resume)
    typer.echo(f"{answer.in_flight} requests in flight")


@gateway_app.command("log-level")
def log_level(
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    address: Address = DEFAULT,
    api_key: ApiKey = None,
    tls_ca_file: CaFile = None,
) -> None:
    """Change what is logged."""
    typer.echo(f"it was {_call('SetLogLevel', address, api_key, tls_ca_file, level=level).previous}")


def _call(method: str, target: str, api_key: str | None, ca_file: Path | None, /, **fields: Any) -> Any:
    """One RPC. Raises KatydidError."""
    import grpc
    from katydid.gateway.v1 import admin_pb2
    from katydid.gateway.v1.admin_pb2_grpc import AdminServiceStub
    from katydid_runtime.bearer import headers
    from katydid_runtime.channel import open_channel
    from katydid_runtime.rpc_errors import from_rpc_error
    from katydid_runtime.tls import client_tls

    async def call() -> Any:
        async with open_channel(target, client_tls(str(ca_file) if ca_file else None, None)) as channel:
            try:
                request = getattr(admin_pb2, f"{method}Request")(**fields)
                rpc = getattr(AdminServiceStub(channel), method)
                return await rpc(request, timeout=_TIMEOUT_S, metadata=headers(api_key))
            except grpc.RpcError as error:
                raise from_rpc_error(error, target) from error

    return asyncio.run(call())
