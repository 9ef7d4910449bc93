"""Real engines of two roles: one computes the prompt, the other fetches its blocks and continues; nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import AdminServiceStub
from katydid_client import AsyncKatydid

from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.e2e

PROMPT = "An engine that computes prompts hands them to one that continues them. " * 5


@asynccontextmanager
async def roles(fleet: Fleet, **wanted: pb.Role) -> AsyncIterator[None]:
    """Engines by the ends of their names, in these roles; both again afterwards."""

    async def change(engine: str, role: pb.Role) -> None:
        async with grpc.aio.insecure_channel(fleet.engines[engine].address) as channel:
            await AdminServiceStub(channel).SetRole(pb.SetRoleRequest(role=role))

    try:
        for name, role in wanted.items():
            await change(f"engine-{name}", role)
        yield
    finally:
        for name in wanted:
            await change(f"engine-{name}", pb.ROLE_BOTH)


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.05)


def test_a_prompt_is_computed_on_one_engine_and_continued_on_the_other(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with AsyncKatydid(fleet.gateway.address, timeout=60) as client:

            async def ask(n: int) -> tuple[object, ...]:
                answer = await client.generate(PROMPT, max_tokens=24, temperature=0.8, seed=5, n=n, ignore_eos=True)
                return answer.choices, answer.timing.engine

            whole = {n: (await ask(n))[0] for n in (1, 3)}
            await fleet.empty_engines()
            async with roles(fleet, a=pb.ROLE_PREFILL, b=pb.ROLE_DECODE):

                async def paired() -> bool:
                    return (await client.explain_route(PROMPT)).candidates[0].partner == "engine-b"

                await eventually(paired)
                handed = fleet.gateway.metric("katydid_gateway_handed_off_choices_total", engine="engine-a")
                for n in (1, 3):
                    assert await ask(n) == (whole[n], "engine-b")
                now = fleet.gateway.metric("katydid_gateway_handed_off_choices_total", engine="engine-a")
                assert now - handed == 4

            async def whole_again() -> bool:
                route = await client.explain_route(PROMPT)
                return not any(candidate.partner or candidate.excluded for candidate in route.candidates)

            await eventually(whole_again)

    asyncio.run(scenario())
