"""All engines of one model, and the cache service beside them: which model they serve, and within which limits."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import reduce

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.errors import IdentityMismatchError, UnavailableError

from katydid_gateway.engines.cache_instances import CacheInstances
from katydid_gateway.engines.connection import EngineConnection
from katydid_gateway.engines.engine_session import EngineSession
from katydid_gateway.engines.parity import Parity
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.routing.router import Router
from katydid_gateway.settings import EngineAddress, GatewaySettings
from katydid_gateway.validation import ModelLimits

__all__ = ["Fleet"]


class Fleet:
    """Connections to every configured engine. The engines of a fleet serve one model under one identity."""

    def __init__(self, settings: GatewaySettings, router: Router, metrics: GatewayMetrics, parity: Parity) -> None:
        self.router = router
        self._tls = settings.client_tls()
        self._caches: CacheInstances | None = None
        if settings.kvcache_address is not None:
            token = settings.kvcache_token()
            self._caches = CacheInstances(settings.kvcache_address, router.tiers, tls=self._tls, token=token)
        self._identity = b""
        self._limits: ModelLimits | None = None
        self._cache_task: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        client = f"gateway-{socket.gethostname()}-{os.getpid()}"

        def connection(where: EngineAddress) -> EngineConnection:
            return EngineConnection(
                where,
                router,
                metrics,
                tls=self._tls,
                client=client,
                parity=parity,
                admit=self._admit,
                transport_delay_s=settings.fault_delays.get("transport", 0.0),
            )

        self._connection = connection
        self.connections: dict[str, EngineConnection] = {}
        for where in settings.engine_addresses():
            self.connections[where.name] = connection(where)

    @property
    def ready(self) -> bool:
        """Whether at least one engine takes requests."""
        return any(connection.ready for connection in self.connections.values())

    @property
    def healthy(self) -> int:
        """Engines that take requests."""
        return sum(connection.ready for connection in self.connections.values())

    @property
    def limits(self) -> ModelLimits:
        """What the model is called and can do. Raises UnavailableError before the first engine was met."""
        if self._limits is None:
            raise UnavailableError("no engine has been reached yet", retry_after_s=1.0)
        return self._limits

    @property
    def identity(self) -> bytes:
        """Model identity that block hashes begin with."""
        return self._identity

    def session(self, engine: str) -> EngineSession:
        """Raises UnavailableError when the engine is not connected."""
        connection = self.connections.get(engine)
        session = None if connection is None else connection.session
        if session is None:
            raise UnavailableError(f"engine {engine} is not connected")
        return session

    def start(self) -> None:
        for name, connection in self.connections.items():
            self._tasks[name] = asyncio.create_task(connection.run())

    def add(self, where: EngineAddress) -> None:
        """One more engine, under a name that none has."""
        self.connections[where.name] = self._connection(where)
        self._tasks[where.name] = asyncio.create_task(self.connections[where.name].run())

    async def remove(self, name: str) -> None:
        """Leave an engine: its requests are told that it is lost."""
        task = self._tasks.pop(name)
        del self.connections[name]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if name not in self.connections:  # nobody has added another of that name meanwhile
            del self.router.engines[name]

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([self._cache_task] if self._cache_task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self, newcomer: EngineConnection, description: pb.DescribeResponse) -> None:
        others = {c.name: c.description for c in self.connections.values() if c is not newcomer and c.description}
        for name, other in others.items():
            if description.identity != other.identity:
                raise IdentityMismatchError(
                    f"engine {newcomer.name} has another model identity than engine {name}: "
                    "other weights, KV type, page layout or numerics",
                    field="identity",
                )
            if description.model != other.model:
                raise IdentityMismatchError(
                    f"engine {newcomer.name} calls its model {description.model}, engine {name} calls it {other.model}",
                    field="model",
                )
        self._limits = reduce(_both, (_limits(each) for each in (description, *others.values())))
        if description.identity != self._identity:
            self._identity = description.identity
            if self._cache_task is not None:
                self._cache_task.cancel()
            if self._caches is not None:
                self._cache_task = asyncio.create_task(self._caches.follow(self._identity))


def _limits(description: pb.DescribeResponse) -> ModelLimits:
    return ModelLimits(
        model=description.model,
        max_model_tokens=description.max_model_tokens,
        vocab_size=description.vocab_size,
        max_choices=max(1, description.max_choices),
        max_logprobs=description.max_logprobs,
        grammar_kinds=frozenset(description.grammar_kinds),
    )


def _both(one: ModelLimits, other: ModelLimits) -> ModelLimits:
    """What either engine can do: a request must fit whichever it is sent to."""
    return ModelLimits(
        model=one.model,
        max_model_tokens=min(one.max_model_tokens, other.max_model_tokens),
        vocab_size=min(one.vocab_size, other.vocab_size),
        max_choices=min(one.max_choices, other.max_choices),
        max_logprobs=min(one.max_logprobs, other.max_logprobs),
        grammar_kinds=one.grammar_kinds & other.grammar_kinds,
    )
