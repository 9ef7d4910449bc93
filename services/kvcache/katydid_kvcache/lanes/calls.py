"""The RPCs of KvCacheService that move blocks outside gRPC: OpenLane for who reads, Pull for who wants them here."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import UnsupportedError

from katydid_kvcache import requests
from katydid_kvcache.cache import Cache
from katydid_kvcache.figures import Figures
from katydid_kvcache.lanes.desk import LaneDesk
from katydid_kvcache.lanes.puller import Puller

__all__ = ["LaneCalls"]

_PULL_LIMIT_S = 600.0
_PULL_S = 10.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class LaneCalls:
    """`desk` is None without a lane address, `puller` without instances to pull from."""

    def __init__(self, cache: Cache, figures: Figures, desk: LaneDesk | None, puller: Puller | None) -> None:
        self._cache = cache
        self._figures = figures
        self._desk = desk
        self._puller = puller

    async def OpenLane(self, request: pb.OpenLaneRequest, _context: Context) -> pb.OpenLaneResponse:
        attachment = self._cache.attachments.find(request.attachment)
        if self._desk is None:
            raise UnsupportedError("this service has no bulk lanes", field="lane_listen", allowed="Get, by stream")
        started = time.monotonic()
        asker = requests.asker(request.tenant, request.session)
        names = self._cache.names(asker, requests.hash_list(request.hashes))
        offer = await self._desk.open(attachment.namespace, names)
        self._figures.lane_seconds.observe(time.monotonic() - started)
        return pb.OpenLaneResponse(
            token=offer.token,
            checksums=offer.checksums,
            misses=[
                pb.BlockMiss(index=place, reason=pb.BlockMissReason.ValueType(reason))
                for place, reason in offer.misses.items()
            ],
            times=[
                pb.TierTime(tier=pb.Tier.ValueType(tier), blocks=blocks, duration=to_duration(time_s))
                for tier, (blocks, time_s) in offer.times.items()
            ],
        )

    async def Pull(self, request: pb.PullRequest, _context: Context) -> pb.PullResponse:
        started = time.monotonic()
        attachment = self._cache.attachments.find(request.attachment)
        hashes, parents = requests.linked_hashes(request.hashes, request.parents)
        deadline_s = _PULL_S
        if request.HasField("deadline"):
            deadline_s = requests.seconds(request.deadline, "deadline", limit=_PULL_LIMIT_S)
        if self._puller is None:
            raise UnsupportedError("this service pulls from nobody", field="source", allowed="with pull_from set")
        asker = requests.asker(request.tenant, request.session)
        pulled = await self._puller.pull(attachment.namespace, request.source, hashes, parents, deadline_s, asker)
        self._figures.pull_seconds.observe(time.monotonic() - started)
        return pb.PullResponse(
            pulled=pulled.pulled,
            present=pulled.present,
            missed=pulled.missed,
            duration=to_duration(time.monotonic() - started),
        )
