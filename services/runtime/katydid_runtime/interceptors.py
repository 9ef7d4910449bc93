"""Put one async context manager around every RPC of a grpc.aio server, whatever its kind.

`around(method, context)` is entered before the handler and left when the handler has finished, failed or been
cancelled. Handlers are coroutines or async generators; grpc.aio would run plain functions in a thread pool, which no
service here uses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias

import grpc

__all__ = ["Around", "AroundInterceptor", "Context"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Around: TypeAlias = Callable[[str, Context], AbstractAsyncContextManager[None]]


class AroundInterceptor(grpc.aio.ServerInterceptor):
    """Applies `around` to the RPCs whose full method name ("/package.Service/Method") passes `applies`."""

    def __init__(self, around: Around, applies: Callable[[str], bool] = bool) -> None:
        self._around = around
        self._applies = applies

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not self._applies(method):
            return handler
        return _wrap(handler, method, self._around)


def _wrap(handler: grpc.RpcMethodHandler[Any, Any], method: str, around: Around) -> grpc.RpcMethodHandler[Any, Any]:
    kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    behaviour: Any = getattr(handler, "_".join(kind))

    async def unary(request: Any, context: Context) -> Any:
        async with around(method, context):
            return await behaviour(request, context)

    async def stream(request: Any, context: Context) -> None:
        async with around(method, context):
            responses = behaviour(request, context)
            if not hasattr(responses, "__aiter__"):
                # The handler writes through context.write() itself.
                await responses
                return
            # Written, not yielded: when the RPC is cancelled, grpc.aio leaves a generator that waits in its `yield` to
            # the garbage collector, which cleans up later and in another context.
            async with aclosing(responses):
                async for response in responses:
                    await context.write(response)

    make: Any = getattr(grpc, "_".join(kind) + "_rpc_method_handler")
    wrapped: grpc.RpcMethodHandler[Any, Any] = make(
        stream if handler.response_streaming else unary,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return wrapped
