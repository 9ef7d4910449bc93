"""katydid.gateway.v1.AdminService: what an operator may ask of a gateway, and change, while it runs."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

import grpc
from katydid.gateway.v1 import admin_pb2 as pb
from katydid.gateway.v1.admin_pb2_grpc import AdminServiceServicer
from katydid_runtime.errors import ConflictError, InvalidRequestError, NotFoundError

from katydid_gateway.access.door import Door
from katydid_gateway.access.registration import EngineAllowList
from katydid_gateway.access.scopes import Scope
from katydid_gateway.generation import Generator
from katydid_gateway.posture import posture
from katydid_gateway.settings import ENGINE_NAMES, EngineAddress, GatewaySettings, is_engine_name

__all__ = ["AdminServicer"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger(__name__)


class AdminServicer(AdminServiceServicer):
    """Every call is logged with who made it."""

    def __init__(self, settings: GatewaySettings, generator: Generator, door: Door) -> None:
        self._settings = settings
        self._generator = generator
        self._door = door
        self._allowed = EngineAllowList(settings.engine_networks, settings.engine_ports)

    async def GetPosture(self, _request: pb.GetPostureRequest, context: Context) -> pb.GetPostureResponse:
        await self._admitted("GetPosture", context)
        return pb.GetPostureResponse(
            findings=[
                pb.PostureFinding(subject=each.subject, open=each.open, state=each.state, remedy=each.remedy)
                for each in posture(self._settings)
            ]
        )

    async def SetDraining(self, request: pb.SetDrainingRequest, context: Context) -> pb.SetDrainingResponse:
        await self._admitted("SetDraining", context, draining=request.draining)
        self._generator.draining = request.draining
        return pb.SetDrainingResponse(in_flight=self._generator.in_flight)

    async def ListEngines(self, _request: pb.ListEnginesRequest, context: Context) -> pb.ListEnginesResponse:
        await self._admitted("ListEngines", context)
        fleet = self._generator.fleet
        return pb.ListEnginesResponse(
            engines=[
                pb.EngineStatus(
                    name=each.name,
                    address=each.address,
                    excluded=fleet.router.engines[each.name].excluded,
                    in_flight=each.session.in_flight if each.session is not None else 0,
                )
                for each in fleet.connections.values()
            ]
        )

    async def AddEngine(self, request: pb.AddEngineRequest, context: Context) -> pb.AddEngineResponse:
        await self._admitted("AddEngine", context, engine=request.name, address=request.address)
        name = request.name or request.address
        address = await self._allowed.resolved(request.address)
        if not is_engine_name(name):
            raise InvalidRequestError("the name is not usable", field="name", value=name, allowed=ENGINE_NAMES)
        if name in self._generator.fleet.connections:
            raise ConflictError(f"there is an engine {name} already", field="name", value=name)
        self._generator.fleet.add(EngineAddress(name, address))
        return pb.AddEngineResponse(address=address)

    async def RemoveEngine(self, request: pb.RemoveEngineRequest, context: Context) -> pb.RemoveEngineResponse:
        await self._admitted("RemoveEngine", context, engine=request.name)
        known = self._generator.fleet.connections
        if request.name not in known:
            raise NotFoundError(
                f"there is no engine {request.name!r}", field="name", value=request.name, allowed=", ".join(known)
            )
        await self._generator.fleet.remove(request.name)
        return pb.RemoveEngineResponse()

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        await self._admitted("SetLogLevel", context, new_level=request.level)
        if request.level not in _LEVELS:
            raise InvalidRequestError(
                f"level is {request.level!r}", field="level", value=request.level, allowed=", ".join(_LEVELS)
            )
        root = logging.getLogger()
        previous = logging.getLevelName(root.level).lower()
        root.setLevel(request.level.upper())
        return pb.SetLogLevelResponse(previous=previous)

    async def _admitted(self, method: str, context: Context, **details: object) -> None:
        """Raises UnauthenticatedError, PermissionDeniedError."""
        known = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        tenant = await self._door.tenant(known.get("authorization", ""), Scope.ADMIN)
        logger.info("admin call", extra={"method": method, "tenant": tenant, **details})
