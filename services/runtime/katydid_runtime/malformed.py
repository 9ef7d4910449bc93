"""A message that cannot be parsed is its caller's fault: grpc.aio calls it UNKNOWN, and logs a traceback of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from katydid_runtime.errors import InvalidRequestError
from katydid_runtime.interceptors import Context

__all__ = ["MalformedInterceptor"]


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """The innermost interceptor: InvalidRequestError instead of what a parser raises."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        return _guarded(handler, handler.request_deserializer)


def _guarded(
    handler: grpc.RpcMethodHandler[Any, Any], parse: Callable[[bytes], Any]
) -> grpc.RpcMethodHandler[Any, Any]:
    kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    behaviour: Any = getattr(handler, "_".join(kind))

    def parsed(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            error = InvalidRequestError(
                "the message cannot be parsed", field="message", allowed="a protobuf of the method's request"
            )
            if handler.request_streaming:
                raise error from None
            # What parses a single message is called outside of all interceptors.
            return error

    def single(request: Any, context: Context) -> Any:
        if isinstance(request, InvalidRequestError):
            raise request
        return behaviour(request, context)

    make: Any = getattr(grpc, "_".join(kind) + "_rpc_method_handler")
    guarded: grpc.RpcMethodHandler[Any, Any] = make(
        behaviour if handler.request_streaming else single,
        request_deserializer=parsed,
        response_serializer=handler.response_serializer,
    )
    return guarded
