"""What surrounds an RPC is left where it was entered, also by an RPC that is cancelled while it waits to write."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1 import gateway_pb2_grpc as pb_grpc
from katydid_runtime import log
from katydid_runtime.interceptors import AroundInterceptor


def test_a_stream_cancelled_in_flow_control_is_cleaned_up_in_its_own_task():
    left: list[tuple[str, bool]] = []
    tasks: dict[str, asyncio.Task | None] = {}
    stuck = asyncio.Event()
    done = asyncio.Event()

    class Servicer(pb_grpc.InferenceServiceServicer):
        async def Generate(self, request, context):
            tasks["handler"] = asyncio.current_task()
            try:
                with log.bind(request="r1"):
                    for number in range(10_000):
                        if number == 4:
                            asyncio.get_running_loop().call_later(0.2, stuck.set)
                        yield pb.GenerateResponse(text="x" * 100_000)
            finally:
                left.append(("handler", asyncio.current_task() is tasks["handler"]))

    @asynccontextmanager
    async def around(method, context):
        task = asyncio.current_task()
        try:
            yield
        finally:
            left.append(("around", asyncio.current_task() is task))
            done.set()

    async def scenario():
        server = grpc.aio.server(interceptors=[AroundInterceptor(around)])
        pb_grpc.add_InferenceServiceServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = pb_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest())
                await call.read()
                await asyncio.wait_for(stuck.wait(), 10)
                call.cancel()
                await asyncio.wait_for(done.wait(), 10)
        finally:
            await server.stop(None)

    asyncio.run(scenario())
    assert left == [("handler", True), ("around", True)]
