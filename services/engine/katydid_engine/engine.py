"""Wires one engine: workers, face, cache connector, gRPC and HTTP; and decides when it is healthy and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import (
    add_AdminServiceServicer_to_server,
    add_EngineServiceServicer_to_server,
)
from katydid_cache import Cache, keep_buffers_mapped, open_cache
from katydid_runtime.block_hash import BLOCK_TOKENS, fingerprint
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import KatydidError
from katydid_runtime.exposition import Exposition
from katydid_runtime.process_folder import process_folder
from katydid_runtime.server import RpcServer
from katydid_runtime.telemetry import Telemetry

from katydid_engine.admin_service import ROLES, AdminService
from katydid_engine.block_watch import BlockWatch
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.face import Face
from katydid_engine.gpu_figures import GpuFigures
from katydid_engine.grammar import GrammarKind
from katydid_engine.grammar_checks import GrammarChecks, GrammarLimits
from katydid_engine.kv_connector import KvConnector
from katydid_engine.messages import Load, Ready
from katydid_engine.model_facts import ModelFacts, read_model_facts
from katydid_engine.other_protocol import add_other_protocol
from katydid_engine.service import EngineService
from katydid_engine.settings import EngineSettings
from katydid_engine.staging import Staging, StagingShape
from katydid_engine.submission import EngineLimits
from katydid_engine.vllm_names import VllmNames
from katydid_engine.worker_config import WorkerConfig
from katydid_engine.worker_group import WorkerGroup

__all__ = ["serve"]

_SERVICES = ("katydid.engine.v1.EngineService", "katydid.engine.v1.AdminService")
_LONG_LIVED = ("/katydid.engine.v1.EngineService/Session", "/katydid.engine.v1.EngineService/Watch")
_HEALTH_POLL_S = 0.2
_LOAD_INTERVAL_S = 0.2
_LAST_FRAMES_S = 0.5
_LEAST_SLOTS = 2
_IN_PLACE_BLOCKS = 4096
_ABORT_BEFORE_S = 1.0

logger = logging.getLogger(__name__)


async def serve(settings: EngineSettings, telemetry: Telemetry) -> None:
    """Runs an engine until it is told to stop.

    Raises:
        SettingsError: it cannot start as configured; ModelFolderError and AddressInUseError among them.
        KatydidError: a worker failed.
    """
    server = RpcServer(
        settings.listen,
        services=_SERVICES,
        long_lived=_LONG_LIVED,
        drain_timeout_s=settings.drain_timeout_s,
        tls=settings.server_tls(),
    )
    service = EngineService()
    admin = AdminService(settings.profile_folder)
    metrics = EngineMetrics()
    _register(settings, metrics)
    add_EngineServiceServicer_to_server(service, server.grpc)
    add_AdminServiceServicer_to_server(admin, server.grpc)
    other = add_other_protocol(server, wanted=settings.vllm_protocol)
    exposition = Exposition(metrics.metrics, lambda: server.serving)
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.grpc.stop, 0)
        if settings.http_listen is not None:
            logger.info("metrics", extra={"address": await exposition.start(settings.http_listen)})
            stack.push_async_callback(exposition.stop)
        engine = await stack.enter_async_context(_started(settings, telemetry, metrics))
        service.open(engine.face, engine.blocks, engine.describe, engine.face.drain)
        admin.open(engine.face, engine.groups)
        others = [other.open(engine.face, settings.model, settings.name)] if other is not None else []
        exposition.alive = lambda: not engine.stalled
        await engine.attend(server, others)


def _register(settings: EngineSettings, metrics: EngineMetrics) -> None:
    """What is read only when Prometheus asks."""
    registry = metrics.metrics.registry
    if settings.device == "cuda":
        registry.register(GpuFigures())
    if settings.vllm_metric_names:
        registry.register(VllmNames(registry, settings.name))


class Engine:
    """The running parts of an engine, all workers ready."""

    def __init__(
        self,
        settings: EngineSettings,
        telemetry: Telemetry,
        metrics: EngineMetrics,
        model: ModelFacts,
        workers: Sequence[Worker],
        cache: Cache | None,
        checks: GrammarChecks,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._model = model
        self._cache = cache
        self._boot_id = uuid.uuid4().hex
        self._pages = min(worker.ready.num_pages for worker in workers)
        self.groups = [worker.group for worker in workers]
        self._connectors = [
            KvConnector(
                cache,
                worker.staging,
                worker.group.send,
                metrics,
                settings.faults,
                functools.partial(self._prefill_speed, rank),
                _in_place_blocks(settings),
            )
            for rank, worker in enumerate(workers)
            if cache is not None and worker.staging is not None
        ]
        self.blocks = BlockWatch(self._boot_id, settings.dp_ranks)
        self.face = Face(
            EngineLimits(
                identity=model.identity,
                dense_identity=model.dense_identity,
                vocab_size=model.config.vocab_size,
                max_model_tokens=min(worker.ready.max_model_tokens for worker in workers),
                max_choices=settings.sequences,
                max_logprobs=settings.max_logprobs,
                dp_ranks=settings.dp_ranks,
                grammar_kinds=_grammar_kinds(settings),
            ),
            send=lambda rank, message: self.groups[rank].send(message),
            ask_cache=lambda rank, ask, spans: self._connectors[rank].ask(ask, spans),
            check_grammar=checks.check,
            blocks=self.blocks,
            metrics=metrics,
            telemetry=telemetry,
            loads=[Load(free_pages=w.ready.num_pages, total_pages=w.ready.num_pages) for w in workers],
            role=ROLES[settings.role],
            boot_id=self._boot_id,
            reattach_window_s=settings.reattach_window_s,
            max_requests=settings.max_requests,
        )
        for rank, group in enumerate(self.groups):
            group.on_report = functools.partial(self.face.on_report, rank)
            group.on_balance = functools.partial(metrics.note_balance, rank)

    def _prefill_speed(self, dp_rank: int) -> float:
        """Tokens a second to weigh fetching against; 0: fetch whatever is found."""
        return self.face.prefill_speed(dp_rank) if self._settings.kvcache_fetch == "cheaper" else 0.0

    @property
    def stalled(self) -> bool:
        """Whether a step loop has been silent for longer than it may."""
        return any(group.stalled(self._settings.stall_timeout_s) for group in self.groups)

    async def attend(self, server: RpcServer, others: Sequence[asyncio.Task[None]] = ()) -> None:
        """Until a signal ends the engine, or the failure of a worker, of a part or of ``others`` does, which end with
        it. Raises that failure."""
        tasks = [*others, *(asyncio.create_task(connector.run()) for connector in self._connectors)]
        tasks.append(asyncio.create_task(self.face.share_loads(_LOAD_INTERVAL_S)))
        tasks.append(asyncio.create_task(self._report_health(server)))
        signalled = asyncio.create_task(server.run_until_signal(self._drain))
        failures = [group.failure for group in self.groups]
        try:
            waiting: list[asyncio.Future[Any]] = [signalled, *failures, *tasks]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for failure in failures:
                if failure.done():
                    await self._fail(server, failure.result())
            for task in tasks:
                if task.done():
                    await task  # none of them ends by itself: this raises the defect that ended it
            await signalled
        finally:
            for task in (signalled, *tasks):
                task.cancel()
            await asyncio.gather(signalled, *tasks, return_exceptions=True)

    def describe(self) -> pb.DescribeResponse:
        settings, limits, identity = self._settings, self.face.limits, self._model.identity
        return pb.DescribeResponse(
            model=settings.name,
            identity=identity,
            hash_fingerprint=fingerprint(identity),
            block_tokens=BLOCK_TOKENS,
            max_model_tokens=limits.max_model_tokens,
            vocab_size=limits.vocab_size,
            dp_ranks=limits.dp_ranks,
            pages_per_rank=self._pages,
            role=self.face.role,
            eos_token_ids=self._model.config.eos_token_ids,
            boot_id=self._boot_id,
            reattach_window=to_duration(settings.reattach_window_s),
            max_choices=limits.max_choices,
            max_logprobs=limits.max_logprobs,
            kv_cache_attached=any(connector.attached for connector in self._connectors),
            kvcache_instance="" if self._cache is None else self._cache.peer_address,
            golden_digest=self._model.golden_digest,
            version=importlib.metadata.version("katydid"),
            tokenizer_digest=self._model.tokenizer_digest,
            grammar_kinds=limits.grammar_kinds,
            block_bytes=self._model.layout.block_bytes,
        )

    async def _drain(self) -> None:
        # What is still running then is aborted by its Finish, a moment before the server would cut the streams.
        await self.face.drain(max(0.0, self._settings.drain_timeout_s - _ABORT_BEFORE_S))

    async def _fail(self, server: RpcServer, error: KatydidError) -> None:
        logger.error("a worker failed, the engine ends", extra={"reason": error.reason, "error": error.message})
        self.face.fail(error)
        await server.set_serving(False)
        # The typed errors of open requests leave with the frames of this last moment.
        await asyncio.sleep(_LAST_FRAMES_S)
        raise error

    async def _report_health(self, server: RpcServer) -> None:
        """Health follows the step loops: a loop that turns no more is no longer SERVING."""
        while True:
            stalled = self.stalled
            for rank, group in enumerate(self.groups):
                self._metrics.silence.labels(str(rank)).set(group.silence_s)
                group.check_voice(self._settings.rank_timeout_s)
            healthy = not stalled and self.face.failure is None and not self.face.draining
            if healthy != server.serving:
                await server.set_serving(healthy)
                if stalled:
                    logger.error("a step loop is stuck", extra={"timeout_s": self._settings.stall_timeout_s})
            await asyncio.sleep(_HEALTH_POLL_S)


@dataclass(frozen=True, slots=True)
class Worker:
    """A started group, what it said of itself, and the memory it shares with the face."""

    group: WorkerGroup
    ready: Ready
    staging: Staging | None


@contextlib.asynccontextmanager
async def _started(settings: EngineSettings, telemetry: Telemetry, metrics: EngineMetrics) -> AsyncIterator[Engine]:
    """An engine whose workers have loaded the model; they end with the block, whatever happens in it."""
    model = await read_model_facts(settings)
    async with contextlib.AsyncExitStack() as stack:
        rendezvous = str(stack.enter_context(process_folder("katydid-engine-")))

        groups: list[WorkerGroup] = []

        async def stop() -> None:
            # All at once: ranks that compute together cannot go on without each other.
            failed = any(group.failure.done() for group in groups)
            await asyncio.gather(*(group.stop(failed=failed) for group in groups))

        stack.push_async_callback(stop)

        async def start(dp_rank: int) -> Worker:
            staging = _new_staging(settings, model) if settings.kvcache_address is not None else None
            group = WorkerGroup(_worker_config(settings, model, dp_rank, staging, rendezvous))
            groups.append(group)
            return Worker(group, await group.start(), staging)

        cache = _open_cache(settings)
        if cache is not None:
            stack.push_async_callback(cache.close)
        checks = GrammarChecks(
            GrammarLimits(
                str(settings.model),
                model.config.vocab_size,
                model.config.eos_token_ids,
                settings.grammar_timeout_s,
                settings.grammar_memory_mib,
            )
        )
        stack.callback(checks.close)
        warms = settings.warm_grammars and bool(_grammar_kinds(settings))
        # Beside the load of the model where there are cores for both, else behind it.
        beside = len(os.sched_getaffinity(0)) > 1 + settings.parallel_plan.world_size // settings.nodes
        if warms and beside:
            stack.callback(asyncio.create_task(checks.warm()).cancel)
        workers = await asyncio.gather(*(start(rank) for rank in range(settings.dp_ranks)))
        if warms and not beside:
            stack.callback(asyncio.create_task(checks.warm()).cancel)
        for dp_rank, worker in enumerate(workers):
            metrics.note_start(dp_rank, worker.ready.start_s)
            seconds = {phase: round(took, 3) for phase, took in worker.ready.start_s.items()}
            logger.info("worker ready", extra={"dp_rank": dp_rank, "seconds": seconds})
        if cache is not None:
            keep_buffers_mapped()
            await cache.attach(model.identity, model.layout, arena=True)
        yield Engine(settings, telemetry, metrics, model, workers, cache, checks)


def _grammar_kinds(settings: EngineSettings) -> tuple[GrammarKind, ...]:
    """What can be served here: grammars need a vocabulary, and the library that compiles them."""
    if importlib.util.find_spec("xgrammar") is None or not (settings.model / "tokenizer.json").exists():
        return ()
    return tuple(GrammarKind)


def _open_cache(settings: EngineSettings) -> Cache | None:
    """A client of the cache that the settings name, before the long start of workers: raises SettingsError."""
    if settings.kvcache_address is None:
        return None
    return open_cache(
        settings.kvcache_address,
        others=settings.kvcache_instances,
        name=f"engine {os.getpid()}",
        tls=settings.client_tls(),
        token=settings.kvcache_token(),
        lanes=settings.kvcache_lanes,
    )


def _in_place_blocks(settings: EngineSettings) -> int | None:
    """A GPU alone unpacks beside its steps, however much it is; where ranks meet at the end of a step it is to be what
    takes no longer than the step."""
    return _IN_PLACE_BLOCKS if settings.device == "cuda" and settings.parallel_plan.tp == 1 else None


def _new_staging(settings: EngineSettings, model: ModelFacts) -> Staging:
    slots = settings.staging_mib * 1024 * 1024 // model.layout.block_bytes
    half = max(_LEAST_SLOTS, slots // 2)
    return Staging.create(StagingShape(model.layout.block_bytes, half, half))


def _worker_config(
    settings: EngineSettings, model: ModelFacts, dp_rank: int, staging: Staging | None, rendezvous: str
) -> WorkerConfig:
    """Of the first member of a group; ``rendezvous`` is a folder of this engine."""
    plan = settings.parallel_plan
    members = plan.tp * plan.pp
    if plan.shares_experts:
        rank = (settings.node_rank * settings.dp_ranks + dp_rank) * plan.tp
        meet = f"file://{rendezvous}/all" if settings.rendezvous is None else f"tcp://{settings.rendezvous}"
    else:
        plan, rank, meet = plan.group(), 0, f"file://{rendezvous}/{dp_rank}"
    return WorkerConfig(
        started_at=time.monotonic(),
        folder=str(settings.model),
        device="cpu" if settings.device == "cpu" else f"cuda:{dp_rank * members}",
        dtype=model.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        sparse_prefill=settings.sparse_prefill,
        plan=plan,
        rank=rank,
        member=0,
        members=members,
        dp_rank=dp_rank,
        rendezvous=meet,
        rank_timeout_s=settings.rank_timeout_s,
        micro_batches=settings.micro_batches,
        rebalance_passes=settings.rebalance_passes,
        threads=settings.worker_threads,
        mtp=settings.mtp,
        async_scheduling=settings.async_scheduling,
        cuda_graphs=settings.cuda_graphs,
        tpot_target_s=settings.tpot_target_s,
        ttft_target_s=settings.ttft_target_s,
        num_pages=settings.kv_pages,
        kv_memory_bytes=settings.kv_memory_mib * 1024 * 1024,
        gpu_memory_share=settings.gpu_memory_share,
        max_model_tokens=settings.max_model_tokens,
        max_batch_tokens=settings.batch_tokens,
        max_sequences=settings.sequences,
        log_level=settings.log_level,
        faults=settings.faults,
        staging=staging.shape if staging is not None else None,
        staging_memory=staging.descriptor if staging is not None else None,
    )
