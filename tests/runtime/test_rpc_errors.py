"""Errors over a real loopback connection, unary and streaming, in both directions."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1 import gateway_pb2_grpc as pb_grpc
from katydid_runtime import errors
from katydid_runtime.rpc_errors import error_interceptor, from_rpc_error, from_status, to_status

TOO_HOT = errors.InvalidRequestError("temperature is 3", field="temperature", value=3, allowed="0 to 2")


class Servicer(pb_grpc.InferenceServiceServicer):
    """Raises what it was told to: at once, or after one response in streams."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.closed = asyncio.Event()

    async def Tokenize(self, request, context):
        raise self.error

    async def Generate(self, request, context):
        try:
            yield pb.GenerateResponse(text="first")
            raise self.error
        finally:
            self.closed.set()

    async def Chat(self, request, context):
        await context.write(pb.ChatResponse(content="first"))
        raise self.error


async def _with_server(servicer, call):
    server = grpc.aio.server(interceptors=[error_interceptor()])
    pb_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return await asyncio.wait_for(call(pb_grpc.InferenceServiceStub(channel)), 10)
    finally:
        await server.stop(None)


async def _tokenize(stub):
    await stub.Tokenize(pb.TokenizeRequest())


async def _generate(stub):
    async for response in stub.Generate(pb.GenerateRequest()):
        assert response.text == "first"


async def _chat(stub):
    async for _ in stub.Chat(pb.ChatRequest()):
        pass


def failure(error: BaseException, call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(_with_server(Servicer(error), call))
    return caught.value


@pytest.mark.parametrize("call", [_tokenize, _generate, _chat])
def test_an_error_arrives_as_itself(call):
    error = from_rpc_error(failure(TOO_HOT, call))
    assert type(error) is errors.InvalidRequestError
    assert vars(error) == vars(TOO_HOT)


@pytest.mark.parametrize("error_class", sorted(errors.OUTCOMES, key=lambda c: c.__name__), ids=lambda c: c.__name__)
def test_every_class_survives_a_status(error_class):
    copy = from_status(to_status(error_class("message")))
    assert (type(copy), str(copy)) == (error_class, "message")


def test_other_languages_read_it_with_their_own_tools():
    error = errors.OverloadedError("full", retry_after_s=2.5)
    rpc_error = failure(error, _tokenize)
    assert rpc_error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rpc_error.details() == "full"
    status = rpc_status.from_call(rpc_error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain, info.metadata["retryable"]) == ("OVERLOADED", "katydid", "true")
    assert retry.retry_delay.ToMilliseconds() == 2500

    violation = error_details_pb2.BadRequest()
    assert to_status(TOO_HOT).details[1].Unpack(violation)
    assert violation.field_violations[0].field == "temperature"


@pytest.mark.parametrize("call", [_tokenize, _generate])
def test_a_method_nobody_wrote_is_unimplemented(call, caplog):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(_with_server(pb_grpc.InferenceServiceServicer(), call))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert isinstance(from_rpc_error(caught.value), errors.UnsupportedError)
    assert not [record for record in caplog.records if record.name.startswith("katydid")]


def test_a_method_that_is_not_finished_is_a_defect():
    assert failure(NotImplementedError("half"), _tokenize).code() is grpc.StatusCode.INTERNAL


def test_a_defect_is_logged_once_and_hides_its_cause(caplog):
    with caplog.at_level(logging.ERROR, logger="katydid_runtime"):
        error = from_rpc_error(failure(ZeroDivisionError("secret detail"), _tokenize))
    assert isinstance(error, errors.InternalError)
    (record,) = [record for record in caplog.records if record.name.startswith("katydid_runtime")]
    assert error.error_id
    assert error.error_id in record.getMessage()
    assert record.exc_info is not None
    assert "secret detail" not in str(error)


def test_an_abort_by_the_handler_passes_unchanged():
    class Aborting(pb_grpc.InferenceServiceServicer):
        async def Tokenize(self, request, context):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "mine")

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(_with_server(Aborting(), _tokenize))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert isinstance(from_rpc_error(caught.value), errors.ConflictError)


def test_a_cancelled_stream_closes_its_handler(caplog):
    class Endless(Servicer):
        async def Generate(self, request, context):
            try:
                while True:
                    yield pb.GenerateResponse(text="more")
                    await asyncio.sleep(0.01)
            finally:
                self.closed.set()

    async def leave_early(stub):
        call = stub.Generate(pb.GenerateRequest())
        async for _ in call:
            break
        call.cancel()
        await asyncio.wait_for(servicer.closed.wait(), 5)

    async def scenario():
        nonlocal servicer
        servicer = Endless(TOO_HOT)
        await _with_server(servicer, leave_early)

    servicer: Endless
    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert not caplog.records


@pytest.mark.parametrize(
    ("code", "message", "error_class"),
    [
        ("UNAVAILABLE", "connection refused", errors.UnavailableError),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", errors.DeadlineExceededError),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (5 vs. 4)", errors.PayloadTooLargeError),
        ("RESOURCE_EXHAUSTED", "busy", errors.OverloadedError),
        ("UNIMPLEMENTED", "", errors.UnsupportedError),
        ("UNKNOWN", "?", errors.InternalError),
    ],
)
def test_errors_of_other_servers_are_mapped_by_code(code, message, error_class):
    metadata = grpc.aio.Metadata()
    rpc_error = grpc.aio.AioRpcError(grpc.StatusCode[code], metadata, metadata, details=message)
    error = from_rpc_error(rpc_error)
    assert type(error) is error_class
    assert str(error)


def test_broken_details_fall_back_to_the_code():
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    rpc_error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), metadata, details="gone")
    assert type(from_rpc_error(rpc_error)) is errors.NotFoundError
    foreign = status_pb2.Status(code=5, message="gone")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="NOT_FOUND", domain="example.com"))
    assert type(from_status(foreign)) is errors.NotFoundError
