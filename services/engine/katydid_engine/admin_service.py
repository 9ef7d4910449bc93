"""AdminService over gRPC: role, cache flush, profiles."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1 import engine_pb2_grpc
from katydid_runtime.errors import InvalidRequestError

from katydid_engine.face import Face
from katydid_engine.service import ready
from katydid_engine.worker_group import WorkerGroup

__all__ = ["ROLES", "AdminService"]

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}
_MAX_STEPS = 1000


class AdminService(engine_pb2_grpc.AdminServiceServicer):
    """Answers UNAVAILABLE until ``open`` is called, which the engine does once its workers have their model."""

    def __init__(self, profile_folder: Path) -> None:
        self._face: Face | None = None
        self._groups: Sequence[WorkerGroup] = ()
        self._profile_folder = profile_folder

    def open(self, face: Face, groups: Sequence[WorkerGroup]) -> None:
        self._face, self._groups = face, groups

    async def SetRole(
        self,
        request: pb.SetRoleRequest,
        context: grpc.aio.ServicerContext[pb.SetRoleRequest, pb.SetRoleResponse],  # noqa: ARG002
    ) -> pb.SetRoleResponse:
        if request.role not in ROLES.values():
            raise InvalidRequestError(
                f"role is {request.role}", field="role", value=request.role, allowed="prefill, decode or both"
            )
        return pb.SetRoleResponse(previous=ready(self._face).change_role(request.role))

    async def Flush(
        self,
        request: pb.FlushRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.FlushRequest, pb.FlushResponse],  # noqa: ARG002
    ) -> pb.FlushResponse:
        return pb.FlushResponse(blocks=sum([await group.flush() for group in self._started()]))

    async def Profile(
        self,
        request: pb.ProfileRequest,
        context: grpc.aio.ServicerContext[pb.ProfileRequest, pb.ProfileResponse],  # noqa: ARG002
    ) -> pb.ProfileResponse:
        """Of the first rank; returns when so many steps have run, so it may take as long as the engine is idle."""
        if not 1 <= request.steps <= _MAX_STEPS:
            raise InvalidRequestError(
                f"steps is {request.steps}", field="steps", value=request.steps, allowed=f"1 to {_MAX_STEPS}"
            )
        path = self._profile_folder / f"katydid-profile-{time.time_ns()}.json"
        await self._started()[0].profile(request.steps, str(path))
        return pb.ProfileResponse(path=str(path))

    def _started(self) -> Sequence[WorkerGroup]:
        ready(self._face)
        return self._groups
