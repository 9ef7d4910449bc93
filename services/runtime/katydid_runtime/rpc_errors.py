"""Errors across gRPC, both ways; the only place in Katydid that names a status code.

Server: `error_interceptor()` turns a KatydidError into its status with `google.rpc.ErrorInfo` (reason, domain
"katydid", metadata from `details()`), plus `BadRequest` where a field is named and `RetryInfo` where a delay is known,
so that clients in other languages read them with their own tools. Anything else that escapes a handler becomes
INTERNAL with an id; the traceback is logged once, under that id.

Client: `from_rpc_error()` turns what a call raised back into the same class.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from katydid_runtime import errors
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import InternalError, KatydidError, error_from_details
from katydid_runtime.interceptors import AroundInterceptor, Context

__all__ = ["DOMAIN", "error_interceptor", "from_rpc_error", "from_status", "internal_error", "to_status"]

DOMAIN = "katydid"

_DETAILS_KEY = "grpc-status-details-bin"
# What gRPC puts, after a list of addresses, before the one thing that a reader can use.
_CORE_PREFIX = "Failed to connect to remote host: "
# What it says among much else of a port that answers in HTTP/1.1, such as the gateway's other one.
_CORE_HTTP1 = "http1.x server"
_OUR_OWN = "Locally cancelled"

_WITHOUT_DETAILS: dict[grpc.StatusCode, type[KatydidError]] = {
    grpc.StatusCode.CANCELLED: errors.RequestAbortedError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequestError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ConflictError,
    grpc.StatusCode.ABORTED: errors.ConflictError,
    # Katydid gives a caller all rights or none; a proxy in front may not.
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DATA_LOSS: errors.DataCorruptError,
    grpc.StatusCode.INTERNAL: errors.InternalError,
    grpc.StatusCode.UNKNOWN: errors.InternalError,
}

logger = logging.getLogger(__name__)


def error_interceptor() -> AroundInterceptor:
    """The server interceptor that every Katydid server installs, outermost."""
    return AroundInterceptor(_abort_on_error)


@asynccontextmanager
async def _abort_on_error(method: str, context: Context) -> AsyncIterator[None]:
    try:
        yield
    except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
        raise
    except KatydidError as error:
        failure = error
    except NotImplementedError as error:
        # The generated servicers raise it for a method nobody wrote, with the status set; any other is a defect.
        if context.code() is grpc.StatusCode.UNIMPLEMENTED:
            failure = errors.UnsupportedError(f"this server does not offer {method}")
        else:
            failure = internal_error(error, f"{method} failed")
    except Exception as error:
        failure = internal_error(error, f"{method} failed")
    else:
        return
    status = to_status(failure)
    code = grpc.StatusCode[failure.outcome.grpc_status]
    await context.abort(code, failure.message, ((_DETAILS_KEY, status.SerializeToString()),))


def internal_error(error: Exception, what: str) -> InternalError:
    """Log an unforeseen exception under a new id and return the error that may leave the process in its place."""
    error_id = uuid.uuid4().hex[:12]
    logger.error("%s: internal error %s", what, error_id, exc_info=error, extra={"error_id": error_id})
    return InternalError(f"internal error {error_id}; the server's log has the details", error_id=error_id)


def to_status(error: KatydidError) -> status_pb2.Status:
    """The error as a `google.rpc.Status`, the form for errors inside messages as well as for trailers."""
    metadata = error.details()
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    details: list[Any] = [info]
    if isinstance(error, errors.InvalidRequestError) and error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=to_duration(error.retry_after_s)))
    status = status_pb2.Status(code=code_pb2.Code.Value(error.outcome.grpc_status), message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def from_status(status: status_pb2.Status) -> KatydidError:
    """The error a `google.rpc.Status` describes; a status made by others is mapped by its code."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return error_from_details(info.reason, status.message, info.metadata)
    return _by_code(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message)


def from_rpc_error(error: grpc.RpcError, peer: str | None = None) -> KatydidError:
    """The error behind a failed call; chain it: `raise from_rpc_error(error) from error`.

    `peer` is the address that was called: named where the connection failed, of which gRPC alone knows.
    """
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                return from_status(status_pb2.Status.FromString(value))
            except DecodeError:
                break
    message = call.details() or ""
    if peer is not None and call.code() is grpc.StatusCode.UNAVAILABLE:
        why = "it speaks HTTP/1.1, not gRPC" if _CORE_HTTP1 in message else message.rpartition(_CORE_PREFIX)[2]
        message = f"the connection to {peer} failed: {why}"
    return _by_code(call.code(), message)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _by_code(code: grpc.StatusCode, message: str) -> KatydidError:
    # gRPC itself reports a message above the size limit as RESOURCE_EXHAUSTED, which a retry would never cure.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return errors.PayloadTooLargeError(message)
    # A server that ends cancels the calls that reach it last; what was given up here says so.
    if code is grpc.StatusCode.CANCELLED and not message.startswith(_OUR_OWN):
        return errors.UnavailableError(message or "the server cancelled the call")
    return _WITHOUT_DETAILS.get(code, errors.InternalError)(message or code.name.lower().replace("_", " "))
