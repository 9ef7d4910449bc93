"""Errors as a response or as an event of a stream, in the words of an API: OpenAI's, or others given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from katydid_runtime.errors import (
    InternalError,
    InvalidRequestError,
    KatydidError,
    NotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    UnauthenticatedError,
)
from starlette.responses import Response

from katydid_gateway.http.allowed_words import allowed_words

__all__ = ["OPENAI_ERRORS", "ErrorWords", "as_spelled", "decode_body", "error_detail", "error_response"]

T = TypeVar("T")

_TYPES: tuple[tuple[type[KatydidError], str], ...] = (
    (InvalidRequestError, "invalid_request_error"),
    (NotFoundError, "invalid_request_error"),
    (UnauthenticatedError, "authentication_error"),
    (PermissionDeniedError, "permission_error"),
    (QuotaExceededError, "rate_limit_error"),
)
# OpenAI's own codes where clients look for them.
_CODES = {
    "UNKNOWN_MODEL": "model_not_found",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
}


@dataclass(frozen=True, slots=True)
class ErrorWords:
    """How an API spells an error: the body of a response, and the event that ends a stream."""

    body: Callable[[KatydidError], bytes]
    event: Callable[[KatydidError], bytes]


def error_detail(error: KatydidError) -> dict[str, object]:
    """OpenAI's error object."""
    kind = next((name for cls, name in _TYPES if isinstance(error, cls)), "server_error")
    detail: dict[str, object] = {
        "message": error.message,
        "type": kind,
        "param": error.field,
        "code": _CODES.get(error.reason, error.reason.lower()),
    }
    if error.allowed is not None:
        detail["allowed"] = error.allowed
    if isinstance(error, InternalError) and error.error_id is not None:
        detail["error_id"] = error.error_id
    return detail


def as_spelled(error: KatydidError, names: Mapping[str, str]) -> KatydidError:
    """`error` with its field named as its caller did: `names` has the pipeline's names that an API spells otherwise."""
    head, bracket, rest = (error.field or "").partition("[")
    name = names.get(head)
    if name is not None:
        error.field = f"{name}{bracket}{rest}"
        # But not in the words by which Anthropic's clients know that a prompt is too long.
        error.message = re.sub(rf"\b{head}(?=(\[\d+\])? is (?!too long)|=|`)", name, error.message)
    return error


def _body(error: KatydidError) -> bytes:
    return msgspec.json.encode({"error": error_detail(error)})


OPENAI_ERRORS = ErrorWords(_body, lambda error: b"data: " + _body(error) + b"\n\n")


def error_response(error: KatydidError, request_id: str = "", words: ErrorWords = OPENAI_ERRORS) -> Response:
    """The whole response. A feature that is missing answers 400, because clients retry every 5xx."""
    status = error.outcome.http_status
    if isinstance(error, InvalidRequestError) and status >= 500:
        status = 400
    headers = {"x-request-id": request_id} if request_id else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = f"{max(1, round(error.retry_after_s))}"
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    return Response(words.body(error), status, headers, "application/json")


def decode_body(decoder: msgspec.json.Decoder[T], raw: bytes, at: str = "") -> T:
    """The body as its struct, or what its field `at` holds. Raises InvalidRequestError."""
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise _decode_error(error, at, decoder.type) from error
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", field="body") from None


def _decode_error(error: msgspec.DecodeError, at: str, body: object) -> InvalidRequestError:
    """What msgspec found wrong, with the field where it names one: "… - at `$.messages[0].role`"."""
    text = str(error)
    message, separator, where = text.partition(" - at `$")
    if isinstance(error, msgspec.ValidationError):
        path = where.rstrip("`").lstrip(".") if separator else ""
        quoted = message.partition("`")[2].partition("`")[0] if message.startswith("Object ") else ""
        field = ".".join(part for part in (at, path, quoted) if part)
        spelled = f"{field}: {message}" if field else message
        allowed = allowed_words(body, path) if message.startswith("Invalid") else _allowed(message)
        return InvalidRequestError(spelled[0].lower() + spelled[1:], field=field or None, allowed=allowed)
    return InvalidRequestError(f"the body is no JSON: {text}", field="body")


def _allowed(message: str) -> str | None:
    return message.partition("Expected ")[2].partition(", got")[0] or None
