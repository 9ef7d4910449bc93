"""Runs the KV-cache service: `python -m katydid_kvcache --help` lists its settings."""

from __future__ import annotations

import asyncio
import contextlib

from katydid.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from katydid_cache.allocation import keep_buffers_mapped
from katydid_cache.instances import Instances
from katydid_runtime.exposition import Exposition
from katydid_runtime.metrics import Metrics
from katydid_runtime.process import run_service
from katydid_runtime.server import RpcServer
from katydid_runtime.telemetry import Telemetry

from katydid_kvcache.access import load_access
from katydid_kvcache.admin import ADMIN_SERVICE, AdminService
from katydid_kvcache.arena_socket import ArenaSocket
from katydid_kvcache.cache import Cache
from katydid_kvcache.figures import Figures
from katydid_kvcache.lanes.calls import LaneCalls
from katydid_kvcache.lanes.desk import LaneDesk
from katydid_kvcache.lanes.puller import Puller
from katydid_kvcache.local_calls import LocalConnection
from katydid_kvcache.service import LONG_LIVED, SERVICE, KvCacheService, local_handlers, rpc_handlers
from katydid_kvcache.settings import KvCacheSettings

_FIGURES_S = 1.0
_LANE_THREADS = 32


async def serve(settings: KvCacheSettings, telemetry: Telemetry) -> None:
    """Run until a signal, then drain, write down what is on its way to disk, and stop."""
    metrics = Metrics("kvcache")
    figures = Figures(metrics)
    tls = settings.server_tls()
    access = load_access(settings.tokens_file)
    cache = await Cache.open(settings)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(cache.close)

        def serving(listen: str, *names: str) -> RpcServer:
            """A server of these services at one address."""
            return RpcServer(
                listen,
                services=names,
                long_lived=LONG_LIVED,
                drain_timeout_s=settings.drain_timeout_s,
                tls=tls,
                admit=access.check,
            )

        server = serving(settings.listen, SERVICE, *(() if settings.admin_listen else (ADMIN_SERVICE,)))
        arena = None
        if settings.listen.startswith("unix:"):
            arena = ArenaSocket(
                settings.listen.removeprefix("unix:") + ".arena",
                cache.arena.fd,
                lambda: LocalConnection(local_handlers(service), access.check),
            )
            stack.push_async_callback(arena.stop)
        desk, puller = await _lanes(stack, settings, cache)
        public = settings.peer_address or settings.peer_listen or settings.listen
        service = KvCacheService(
            cache,
            telemetry,
            figures,
            arena,
            lane_port=desk.port if desk else 0,
            peer_address="" if public.startswith("unix:") or public.endswith(":0") else public,
        )
        handlers = rpc_handlers(service, LaneCalls(cache, figures, desk, puller))
        server.grpc.add_generic_rpc_handlers((handlers,))
        others = []
        if settings.peer_listen:
            others.append(serving(settings.peer_listen, SERVICE))
            others[-1].grpc.add_generic_rpc_handlers((handlers,))
        admin = server
        if settings.admin_listen:
            admin = serving(settings.admin_listen, ADMIN_SERVICE)
            others.append(admin)
        pb_grpc.add_AdminServiceServicer_to_server(AdminService(cache), admin.grpc)
        if settings.http_listen:
            exposition = Exposition(metrics, lambda: server.serving)
            await exposition.start(settings.http_listen)
            stack.push_async_callback(exposition.stop)
        scrubbing = cache.scrubber.run(settings.scrub_bytes_per_s)
        for work in (cache.maintain(), scrubbing, _keep_figures(figures, cache)):
            task = asyncio.create_task(work)
            stack.callback(task.cancel)
        await server.start()
        if arena is not None:
            arena.start()
        for other in others:
            await other.start()
            stack.push_async_callback(other.shut_down)
        # The first READY line of the process names the cache's own address.
        for each in (server, *others):
            await each.set_serving(True)

        async def drain() -> None:
            cache.attachments.draining.set()

        await server.run_until_signal(drain)


async def _lanes(
    stack: contextlib.AsyncExitStack, settings: KvCacheSettings, cache: Cache
) -> tuple[LaneDesk | None, Puller | None]:
    """The ends of bulk lanes, as far as the service is to have them; `stack` stops them."""
    desk, puller = None, None
    # Lanes are plain text. A service that speaks TLS says no: streams go on.
    if settings.lane_listen and settings.server_tls() is None:
        desk = LaneDesk(cache, threads=_LANE_THREADS, stall_s=settings.stream_stall_timeout_s)
        desk.start(settings.lane_listen)
        stack.push_async_callback(desk.stop)
    if settings.pull_from:
        sources = Instances(settings.pull_from)
        await sources.refresh()
        following = asyncio.create_task(sources.follow())
        stack.callback(following.cancel)
        puller = Puller(cache, sources, settings.lanes, tls=settings.client_tls(), token=settings.kvcache_token())
        stack.push_async_callback(puller.close)
    return desk, puller


async def _keep_figures(figures: Figures, cache: Cache) -> None:
    while True:
        figures.update(cache)
        await asyncio.sleep(_FIGURES_S)


def main() -> None:
    keep_buffers_mapped()
    run_service("kvcache", KvCacheSettings, serve)


if __name__ == "__main__":
    main()
