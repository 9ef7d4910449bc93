"""`vllm.grpc.engine.VllmEngine` over the engine's own face: a translation, and nothing that the face does not do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.errors import UnsupportedError
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from katydid_engine.face import Face
from katydid_engine.service import ready
from katydid_engine.vllm_protocol.answers import Answer
from katydid_engine.vllm_protocol.model_files import model_info, tokenizer_chunks
from katydid_engine.vllm_protocol.requests import submission
from katydid_engine.vllm_protocol.steps import LocalSession, Submitted

__all__ = ["SERVICE", "VllmEngine", "add_to_server"]

SERVICE = "vllm.grpc.engine.VllmEngine"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Answers UNAVAILABLE until `open` is called. Errors are mapped by the server's interceptor; a caller that leaves
    cancels the handler, and so its request."""

    def __init__(self) -> None:
        self._face: Face | None = None
        self._session: LocalSession | None = None
        self._folder = Path()
        self._name = ""
        self._running: dict[str, Submitted] = {}
        self._since = time.monotonic()
        self._heard_at = 0.0

    def open(self, face: Face, folder: Path, name: str) -> asyncio.Task[None]:
        """The model is loaded; returns the task that has to be cancelled at the end."""
        self._face, self._folder, self._name = face, folder, name
        self._session = LocalSession(face)
        return asyncio.create_task(self._session.run())

    async def Generate(
        self,
        request: vllm.GenerateRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[vllm.GenerateResponse]:
        face, session = ready(self._face), ready(self._session)
        self._heard_at = time.time()
        message = submission(request, face.limits, session.least_loaded())
        answer = Answer(message, stream=request.stream)
        async with session.submit(message) as submitted:
            self._running[request.request_id] = submitted
            try:
                async for step in submitted.steps:
                    for response in answer.responses(step):
                        yield response
            finally:
                if self._running.get(request.request_id) is submitted:
                    del self._running[request.request_id]

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:  # noqa: ARG002
        for request_id in request.request_ids:
            if (submitted := self._running.get(request_id)) is not None:
                submitted.abort()
        return vllm.AbortResponse()

    async def HealthCheck(
        self,
        request: vllm.HealthCheckRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> vllm.HealthCheckResponse:
        face = self._face
        if face is None:
            return vllm.HealthCheckResponse(healthy=False, message="the engine is loading its model")
        if face.failure is not None:
            return vllm.HealthCheckResponse(healthy=False, message=face.failure.message)
        return vllm.HealthCheckResponse(healthy=not face.draining, message="draining" if face.draining else "")

    async def GetModelInfo(
        self,
        request: vllm.GetModelInfoRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> vllm.GetModelInfoResponse:
        return model_info(self._folder, self._name, ready(self._face).limits)

    async def GetServerInfo(
        self,
        request: vllm.GetServerInfoRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> vllm.GetServerInfoResponse:
        face = ready(self._face)
        return vllm.GetServerInfoResponse(
            active_requests=face.num_requests,
            is_paused=face.draining,
            last_receive_timestamp=self._heard_at,
            uptime_seconds=time.monotonic() - self._since,
            server_type="vllm-grpc",
            data_parallel_size=face.limits.dp_ranks,
            block_size=BLOCK_TOKENS,
            max_num_seqs=face.limits.max_choices,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:  # noqa: ARG002
        loads = [
            load
            for rank, load in sorted(ready(self._session).loads.items())
            if not request.HasField("dp_rank") or rank == request.dp_rank
        ]
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("katydid"),
            dp_rank_count=ready(self._face).limits.dp_ranks,
            loads=[self._load(load) for load in loads],
        )

    async def GetTokenizer(
        self,
        request: common_pb2.GetTokenizerRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        ready(self._face)
        for chunk in await asyncio.to_thread(lambda: list(tokenizer_chunks(self._folder))):
            yield chunk

    async def SubscribeKvEvents(
        self,
        request: common_pb2.SubscribeKvEventsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        # Its events name blocks by their token ids, which this engine's block events do not keep.
        _refuse("SubscribeKvEvents")
        yield

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:  # noqa: ARG002
        _refuse("Embed")

    async def FlushCache(self, request: Any, context: Context) -> NoReturn:  # noqa: ARG002
        _refuse("FlushCache", "katydid.engine.v1.AdminService/Flush")

    async def StartProfile(self, request: Any, context: Context) -> NoReturn:  # noqa: ARG002
        _refuse("StartProfile", "katydid.engine.v1.AdminService/Profile")

    async def StopProfile(self, request: Any, context: Context) -> NoReturn:  # noqa: ARG002
        _refuse("StopProfile", "katydid.engine.v1.AdminService/Profile")

    def _load(self, load: pb.RankLoad) -> vllm.SchedulerLoad:
        pages = max(1, load.total_pages)
        used = load.total_pages - load.free_pages
        return vllm.SchedulerLoad(
            dp_rank=load.dp_rank,
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=used * BLOCK_TOKENS,
            max_total_num_tokens=load.total_pages * BLOCK_TOKENS,
            token_usage=used / pages,
            gen_throughput=load.decode_tokens_per_second,
            max_running_requests=ready(self._face).limits.max_choices,
            num_waiting_uncached_tokens=load.waiting_uncached_tokens,
        )


def add_to_server(service: VllmEngine, server: grpc.aio.Server) -> None:
    """Serve the protocol beside the engine's own."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server)


def _refuse(rpc: str, instead: str = "") -> NoReturn:
    raise UnsupportedError(f"this engine does not serve {rpc}", field="rpc", value=rpc, allowed=instead)
