"""The server's life: addresses, health, reflection, message limits, drain by in-flight work."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1 import gateway_pb2_grpc as pb_grpc
from katydid_runtime.channel import CHANNEL_OPTIONS
from katydid_runtime.errors import AddressInUseError, DrainingError, SettingsError, UnavailableError
from katydid_runtime.rpc_errors import from_rpc_error
from katydid_runtime.server import RpcServer

SERVICE = "katydid.gateway.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Servicer(pb_grpc.InferenceServiceServicer):
    """Tokenize waits for `release`; Generate streams until it is cancelled; Detokenize echoes the size."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def Tokenize(self, request, context):
        self.entered.set()
        await self.release.wait()
        return pb.TokenizeResponse(tokens=7)

    async def Generate(self, request, context):
        self.entered.set()
        while True:
            yield pb.GenerateResponse()
            await asyncio.sleep(0.01)

    async def Detokenize(self, request, context):
        return pb.DetokenizeResponse(text="x" * len(request.token_ids))


class House:
    """A started server with its servicer and a channel to it."""

    def __init__(self, listen: str = "127.0.0.1:0", **options) -> None:
        self.servicer = Servicer()
        self.server = RpcServer(listen, services=[SERVICE], **options)
        pb_grpc.add_InferenceServiceServicer_to_server(self.servicer, self.server.grpc)

    async def __aenter__(self) -> House:
        address = await self.server.start()
        await self.server.set_serving(True)
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = pb_grpc.InferenceServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.grpc.stop(None)


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("form", ["127.0.0.1:0", "localhost:0", "unix"])
def test_addresses(form, tmp_path):
    async def scenario():
        listen = f"unix:{tmp_path}/socket" if form == "unix" else form
        async with House(listen) as house:
            assert not house.server.address.endswith(":0")
            house.servicer.release.set()
            assert (await house.stub.Tokenize(pb.TokenizeRequest())).tokens == 7

    run(scenario)


def test_an_address_in_use_is_named(tmp_path):
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(AddressInUseError, match=address):
                await RpcServer(address, services=[]).start()
        for listen in ("127.0.0.1:0", f"unix:{tmp_path}/socket"):
            async with House(listen) as house:
                with pytest.raises(AddressInUseError, match=house.server.address):
                    await RpcServer(house.server.address, services=[]).start()

    run(scenario)


def test_a_stale_socket_file_is_replaced(tmp_path):
    async def scenario():
        path = str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        async with House(f"unix:{path}") as house:
            house.servicer.release.set()
            await house.stub.Tokenize(pb.TokenizeRequest())

    run(scenario)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:http", "127.0.0.1:70000", "unix:/no/such/folder/socket"])
def test_a_malformed_address_is_named(address):
    async def scenario():
        with pytest.raises(SettingsError, match=address):
            await RpcServer(address, services=[]).start()

    run(scenario)


def test_health_by_service_name():
    async def scenario():
        async with House() as house:
            for name in ("", SERVICE):
                answer = await house.health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == SERVING
            await house.server.set_serving(False)
            assert (await house.health.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await house.health.Check(health_pb2.HealthCheckRequest(service="other"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(scenario)


def test_reflection_lists_the_service():
    async def scenario():
        async with House() as house:
            stub = reflection_pb2_grpc.ServerReflectionStub(house.channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            async for answer in stub.ServerReflectionInfo(iter([request])):
                names = [service.name for service in answer.list_services_response.service]
            assert SERVICE in names

    run(scenario)


def test_messages_beyond_grpc_default_pass():
    async def scenario():
        async with House() as house:
            size = 8 * 1024 * 1024
            answer = await house.stub.Detokenize(pb.DetokenizeRequest(token_ids=bytes(size)))
            assert len(answer.text) == size

    run(scenario)


def test_drain_waits_for_running_requests_and_refuses_new_ones():
    async def scenario():
        async with House(drain_timeout_s=10) as house:
            running = asyncio.ensure_future(house.stub.Tokenize(pb.TokenizeRequest()))
            await house.servicer.entered.wait()
            assert house.server.in_flight == 1
            stopping = asyncio.create_task(house.server.shut_down())
            while house.server.serving:
                await asyncio.sleep(0.005)
            assert (await house.health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await house.stub.Tokenize(pb.TokenizeRequest())
            assert isinstance(from_rpc_error(caught.value), DrainingError)
            assert not stopping.done()
            house.servicer.release.set()
            assert (await running).tokens == 7
            await stopping
            assert house.server.in_flight == 0

    run(scenario)


def test_calls_that_come_as_a_server_ends_hear_why():
    async def until_refused(house: House) -> type[Exception]:
        while True:
            try:
                await house.stub.Detokenize(pb.DetokenizeRequest())
            except grpc.aio.AioRpcError as error:
                return type(from_rpc_error(error))

    async def scenario():
        async with House(drain_timeout_s=10) as house:
            callers = [asyncio.create_task(until_refused(house)) for _ in range(100)]
            await asyncio.sleep(0.1)
            await house.server.shut_down()
            assert {await caller for caller in callers} <= {DrainingError, UnavailableError}

    run(scenario)


def test_drain_ends_at_its_timeout():
    async def scenario():
        async with House(drain_timeout_s=0.2) as house:
            running = asyncio.ensure_future(house.stub.Tokenize(pb.TokenizeRequest()))
            await house.servicer.entered.wait()
            await house.server.shut_down()
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await running

    run(scenario)


def test_drain_waits_for_the_service_but_not_for_long_lived_streams():
    async def scenario():
        async with House(drain_timeout_s=10, long_lived=[f"/{SERVICE}/Generate"]) as house:
            stream = house.stub.Generate(pb.GenerateRequest())
            await house.servicer.entered.wait()
            assert house.server.in_flight == 0
            drained = []

            async def drain() -> None:
                drained.append(await stream.read())

            await house.server.shut_down(drain)
            assert drained == [pb.GenerateResponse()]

    run(scenario)


def test_a_failing_drain_still_stops_the_server(caplog):
    async def scenario():
        async with House(drain_timeout_s=10) as house:

            async def drain() -> None:
                raise RuntimeError("cannot drain")

            await house.server.shut_down(drain)
            assert "drain failed" in caplog.text

    run(scenario)


def test_a_second_signal_cuts_the_drain_short():
    async def scenario():
        async with House(drain_timeout_s=60) as house:
            running = asyncio.ensure_future(house.stub.Tokenize(pb.TokenizeRequest()))
            await house.servicer.entered.wait()
            life = asyncio.create_task(house.server.run_until_signal())
            await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            while house.server.serving:
                await asyncio.sleep(0.005)
            assert not life.done()
            os.kill(os.getpid(), signal.SIGINT)
            await life
            await asyncio.gather(running, return_exceptions=True)

    run(scenario)
