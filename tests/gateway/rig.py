"""A gateway with mock engines behind it, in one event loop, and clients to both of its sides."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from katydid.gateway.v1.gateway_pb2_grpc import InferenceServiceStub
from katydid_gateway.gateway import Gateway
from katydid_gateway.settings import GatewaySettings
from katydid_runtime.channel import CHANNEL_OPTIONS
from katydid_runtime.telemetry import Telemetry
from katydid_runtime.tokenizer_digest import tokenizer_digest
from tokenizers import Tokenizer

from tests.gateway.mock_engine import MockEngine, MockOptions


class Rig:
    """What a test of the whole gateway holds in its hands."""

    def __init__(self, gateway: Gateway, engines: list[MockEngine], folder: Path) -> None:
        self.gateway = gateway
        self.engines = engines
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.url = f"http://{gateway.http_address}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20)
        self.channel = grpc.aio.insecure_channel(gateway.grpc_address, options=CHANNEL_OPTIONS)
        self.stub = InferenceServiceStub(self.channel)

    async def chat(self, text: str = "hello there", **fields: Any) -> httpx.Response:
        body = {"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def events(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """Decoded events of a stream; "[DONE]" stands for the end mark."""
        found: list[Any] = []
        async with self.http.stream("POST", path, json={"model": "mock", "stream": True, **body}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else json.loads(data))
        return found

    def says(self, text: str, *, eos: bool = True) -> Callable[..., list[int]]:
        """A script that answers with `text`."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return lambda _prompt, _sampling, _choice: [*ids, 0] if eos else ids


@asynccontextmanager
async def rig(
    folder: Path,
    *,
    engines: int = 1,
    options: MockOptions | None = None,
    elsewhere: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Started and connected; everything is stopped at the end, and nothing may be in flight then.

    `elsewhere` are addresses of engines that the test starts and stops itself.
    """
    mocks = []
    for _ in range(engines):
        own = MockOptions(**vars(options)) if options is not None else MockOptions()
        own.tokenizer_digest = own.tokenizer_digest or tokenizer_digest(folder)
        mocks.append(MockEngine(own))
    addresses = [*[await mock.start() for mock in mocks], *elsewhere]
    telemetry = Telemetry("gateway", trace_file=settings.pop("trace_file", None))
    loaded = GatewaySettings(
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        model=str(folder),
        engines=",".join(f"engine-{number}={address}" for number, address in enumerate(addresses)),
        **{"drain_timeout_s": 2.0, **settings},
    )
    gateway = await Gateway.load(loaded, telemetry)
    await gateway.start()
    built = Rig(gateway, mocks, folder)
    try:
        await until(
            lambda: gateway.fleet.healthy == len(addresses) or any(not m.options.tokenizer_digest for m in mocks)
        )
        yield built
        await until(lambda: gateway.generator.idle.is_set() and not any(mock.in_flight for mock in mocks))
        check_books(gateway)
    finally:
        await built.http.aclose()
        await built.channel.close()
        await gateway.stop()
        await asyncio.gather(*(mock.stop() for mock in mocks))
        await asyncio.to_thread(telemetry.shutdown)


def check_books(gateway: Gateway) -> None:
    """Nothing is left of requests that have ended, and the picture of the caches is sound and within its bound."""
    router = gateway.fleet.router
    router.index.check_integrity()
    assert gateway.generator.flow.budgets.reserved == 0
    assert {
        name: [rank.own | rank.unreported.keys() | rank.due.keys() for rank in engine.ranks]
        for name, engine in router.engines.items()
    } == {name: [set() for _ in engine.ranks] for name, engine in router.engines.items()}
    assert not gateway.generator._answers


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for `condition`; fails when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)
