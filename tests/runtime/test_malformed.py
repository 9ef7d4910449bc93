"""Bytes that are no message are the caller's fault, of whatever kind the RPC is, and nobody's log is filled by them."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from katydid.engine.v1 import engine_pb2_grpc as engine_grpc
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1 import gateway_pb2_grpc as pb_grpc
from katydid_runtime.errors import InvalidRequestError
from katydid_runtime.rpc_errors import from_rpc_error
from katydid_runtime.server import RpcServer

GATEWAY, ENGINE = "katydid.gateway.v1.InferenceService", "katydid.engine.v1.EngineService"


class Gateway(pb_grpc.InferenceServiceServicer):
    async def Tokenize(self, request, context):
        return pb.TokenizeResponse(tokens=7)

    async def Generate(self, request, context):
        yield pb.GenerateResponse()


class Engine(engine_grpc.EngineServiceServicer):
    async def Session(self, requests, context):
        async for _ in requests:
            yield None


def test_bytes_that_are_no_message_are_an_invalid_request(caplog):
    async def scenario() -> None:
        async with RpcServer("127.0.0.1:0", services=[GATEWAY, ENGINE]) as server:
            pb_grpc.add_InferenceServiceServicer_to_server(Gateway(), server.grpc)
            engine_grpc.add_EngineServiceServicer_to_server(Engine(), server.grpc)
            async with grpc.aio.insecure_channel(await server.start()) as channel:
                for call in (
                    channel.unary_unary(f"/{GATEWAY}/Tokenize")(b"\xff\xff"),
                    channel.unary_stream(f"/{GATEWAY}/Generate")(b"\xff\xff").read(),
                    channel.stream_stream(f"/{ENGINE}/Session")(iter([b"\xff\xff"])).read(),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await asyncio.wait_for(call, 10)
                    error = from_rpc_error(caught.value)
                    assert isinstance(error, InvalidRequestError)
                    assert (error.field, error.message) == ("message", "the message cannot be parsed")
                stub = pb_grpc.InferenceServiceStub(channel)
                assert (await stub.Tokenize(pb.TokenizeRequest())).tokens == 7
                assert [one async for one in stub.Generate(pb.GenerateRequest())] == [pb.GenerateResponse()]

    asyncio.run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
