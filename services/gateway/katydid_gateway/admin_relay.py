"""AdminService of several processes: every call goes to all that run, with its caller's key, and their answers are one.

Each process decides by itself who may ask. One that is started later begins with what was changed: the parent keeps the
engines and the log level, and starts none while the gateway drains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from katydid.gateway.v1 import admin_pb2 as pb
from katydid.gateway.v1.admin_pb2_grpc import AdminServiceServicer, AdminServiceStub
from katydid_runtime.channel import open_channel
from katydid_runtime.errors import UnavailableError
from katydid_runtime.rpc_errors import from_rpc_error

from katydid_gateway.settings import GatewaySettings

__all__ = ["AdminRelay"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Answer = TypeVar("Answer", bound=Message)

# A process that is being started listens after it has loaded its model folder.
_PATIENCE_S = 30.0


class AdminRelay(AdminServiceServicer):
    """Runs in the parent; the processes listen on sockets in `folder`, and `running` gives their numbers.

    Changes go one by one, and no process is started during one: whoever starts it holds `turn`.
    """

    def __init__(self, settings: GatewaySettings, folder: str, running: Callable[[], Collection[int]]) -> None:
        self.turn = asyncio.Lock()
        self.may_start = asyncio.Event()
        """Not set while the gateway drains."""
        self.may_start.set()
        self._running = running
        self._sockets = [f"unix:{Path(folder) / f'admin-{number}'}" for number in range(settings.processes)]
        self._engines = {each.name: each.address for each in settings.engine_addresses()}
        self._log_level = settings.log_level
        self._channels: dict[int, grpc.aio.Channel] = {}

    def words(self, number: int) -> Sequence[str]:
        """Options of a process that is started now."""
        engines = ",".join(f"{name}={address}" for name, address in self._engines.items())
        return ("--admin-listen", self._sockets[number], "--engines", engines, "--log-level", self._log_level)

    async def close(self) -> None:
        """Let go of the processes."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def GetPosture(self, request: pb.GetPostureRequest, context: Context) -> pb.GetPostureResponse:
        return (await self._all("GetPosture", pb.GetPostureResponse, request, context))[0]

    async def SetDraining(self, request: pb.SetDrainingRequest, context: Context) -> pb.SetDrainingResponse:
        async with self.turn:
            answers = await self._all("SetDraining", pb.SetDrainingResponse, request, context)
            if request.draining:
                self.may_start.clear()
            else:
                self.may_start.set()
        return pb.SetDrainingResponse(in_flight=sum(answer.in_flight for answer in answers))

    async def ListEngines(self, request: pb.ListEnginesRequest, context: Context) -> pb.ListEnginesResponse:
        """An engine is left out of routing when one process leaves it out."""
        merged: dict[str, pb.EngineStatus] = {}
        for answer in await self._all("ListEngines", pb.ListEnginesResponse, request, context):
            for engine in answer.engines:
                known = merged.setdefault(engine.name, pb.EngineStatus(name=engine.name, address=engine.address))
                known.excluded = known.excluded or engine.excluded
                known.in_flight += engine.in_flight
        return pb.ListEnginesResponse(engines=merged.values())

    async def AddEngine(self, request: pb.AddEngineRequest, context: Context) -> pb.AddEngineResponse:
        async with self.turn:
            answers = await self._all("AddEngine", pb.AddEngineResponse, request, context)
            self._engines[request.name or request.address] = answers[0].address
        return answers[0]

    async def RemoveEngine(self, request: pb.RemoveEngineRequest, context: Context) -> pb.RemoveEngineResponse:
        async with self.turn:
            answers = await self._all("RemoveEngine", pb.RemoveEngineResponse, request, context)
            self._engines.pop(request.name, None)
        return answers[0]

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        async with self.turn:
            answers = await self._all("SetLogLevel", pb.SetLogLevelResponse, request, context)
            self._log_level = request.level  # type: ignore[assignment]  # the processes have checked it
            logging.getLogger().setLevel(request.level.upper())
        return answers[0]

    async def _all(self, method: str, kind: type[Answer], request: Message, context: Context) -> list[Answer]:
        """Every running process's answer, in order. What the first refuses no other hears of.

        Raises the refusal, UnavailableError when a process does not answer.
        """
        metadata = tuple((key, value) for key, value in context.invocation_metadata() or () if key == "authorization")
        answers: list[Answer] = []
        running = sorted(self._running())
        for number in running:
            if number not in self._channels:
                self._channels[number] = open_channel(self._sockets[number])
            call = getattr(AdminServiceStub(self._channels[number]), method)
            try:
                answer = await call(request, metadata=metadata, timeout=_PATIENCE_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                refusal = from_rpc_error(error)
                if not answers:
                    raise refusal from error
                raise UnavailableError(
                    f"{len(answers)} of {len(running)} processes did it, the next one did not: {refusal.message}"
                ) from error
            assert isinstance(answer, kind)
            answers.append(answer)
        if not answers:
            raise UnavailableError("no process runs at the moment", retry_after_s=1.0)
        return answers
