"""Which processes make up a fleet, and what each is told: pure data, made before anything starts."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from katydid_runtime.errors import AddressInUseError

__all__ = [
    "HOST",
    "LAST_PORT",
    "FleetOptions",
    "ServicePlan",
    "check_free",
    "find_device",
    "free_ports",
    "free_run",
    "plan_fleet",
]

HOST = "127.0.0.1"
LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What `katydid up` was asked for. `port` is the OpenAI API's, `grpc_port` the SDK's.

    From `metrics_port` on, the cache service and the engines show their figures. Sizes are in MiB; None leaves them to
    the service: its policy file, or its default.
    """

    model: Path
    model_name: str
    engines: int = 1
    device: str = "cpu"
    port: int = 8000
    grpc_port: int = 8001
    kv_memory_mb: int | None = None
    kv_disk_dir: Path | None = None
    kv_disk_mb: int | None = None
    metrics_port: int | None = None
    trace_file: Path | None = None
    drain_timeout_s: float = 10.0
    engine_arguments: tuple[str, ...] = ()
    gateway_arguments: tuple[str, ...] = ()
    kvcache_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One child: `python -m module arguments`, healthy when `address` says SERVING, started in order of `stage`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    address: str
    stage: int


def plan_fleet(options: FleetOptions, ports: Sequence[int]) -> tuple[ServicePlan, ...]:
    """The KV-cache service first, then engines and gateway together. `ports` holds one for each but the gateway."""
    kvcache_port, *engine_ports = ports[: options.engines + 1]
    # Over a Unix socket engines get the cache's own memory; the port only makes the name nobody else's.
    kvcache_address = f"unix:{tempfile.gettempdir()}/katydid-kvcache-{kvcache_port}.sock"
    engine_addresses = [f"{HOST}:{port}" for port in engine_ports]
    shared: tuple[str, ...] = ("--drain-timeout-s", f"{options.drain_timeout_s:g}")
    if options.trace_file is not None:
        shared += ("--trace-file", str(options.trace_file))

    kvcache = ["--listen", kvcache_address]
    if options.kv_memory_mb is not None:
        kvcache += ["--memory-bytes", str(options.kv_memory_mb * 2**20)]
    if options.kv_disk_dir is not None:
        kvcache += ["--disk-path", str(options.kv_disk_dir)]
    if options.kv_disk_mb is not None:
        kvcache += ["--disk-bytes", str(options.kv_disk_mb * 2**20)]
    kvcache += [*_metrics(options, 0), *shared, *options.kvcache_arguments]

    plans = [ServicePlan("kvcache", "katydid_kvcache", tuple(kvcache), kvcache_address, stage=0)]
    # Engines on one CPU share its cores, less one for the other services; each would take all of them.
    threads: tuple[str, ...] = ()
    if options.device == "cpu" and options.engines > 1:
        threads = ("--threads", str(max(1, ((os.cpu_count() or 1) - 1) // options.engines)))
    names = [f"engine-{index}" for index in range(options.engines)]
    for number, (name, address) in enumerate(zip(names, engine_addresses, strict=True), 1):
        arguments = (
            *("--listen", address, "--model", str(options.model), "--model-name", options.model_name),
            *("--device", options.device, "--kvcache-address", kvcache_address),
            *threads,
            *_metrics(options, number),
            *shared,
            *options.engine_arguments,
        )
        plans.append(ServicePlan(name, "katydid_engine", arguments, address, stage=1))
    gateway_address = f"{HOST}:{options.grpc_port}"
    gateway = (
        *("--listen", gateway_address, "--http-listen", f"{HOST}:{options.port}", "--model", str(options.model)),
        *("--engines", ",".join(f"{name}={address}" for name, address in zip(names, engine_addresses, strict=True))),
        *("--kvcache-address", kvcache_address),
        *shared,
        *options.gateway_arguments,
    )
    plans.append(ServicePlan("gateway", "katydid_gateway", gateway, gateway_address, stage=1))
    return tuple(plans)


def _metrics(options: FleetOptions, number: int) -> tuple[str, ...]:
    return () if options.metrics_port is None else ("--http-listen", f"{HOST}:{options.metrics_port + number}")


def find_device(asked: str) -> str:
    """`asked`, or for "auto" cuda when the NVIDIA driver is loaded, else cpu."""
    if asked != "auto":
        return str(asked)  # a member of an enum too, which errors would print as <Device.CUDA: 'cuda'>
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def free_ports(count: int) -> list[int]:
    """Distinct free ports of the loopback interface. They are free now; a child that loses one to a race says so."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for reserved in sockets:
            reserved.bind((HOST, 0))
        return [reserved.getsockname()[1] for reserved in sockets]


def free_run(count: int) -> int:
    """The first of `count` free ports in a row, as `metrics_port` needs them."""
    while True:
        first = free_ports(1)[0]
        with suppress(OSError, OverflowError), ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server((HOST, port)))
            return first


def check_free(option: str, port: int) -> None:
    """Raises AddressInUseError naming port and option, before minutes go into loading a model."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise AddressInUseError(
                f"port {port} cannot be used: {error.strerror}; {option} chooses another", field="port", value=port
            ) from error
