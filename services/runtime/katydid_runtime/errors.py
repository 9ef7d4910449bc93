"""Every error Katydid raises on purpose, and what each one means on a wire.

KatydidError
├── InvalidRequestError            the request is wrong and would be wrong again
│   ├── PromptTooLongError         prompt plus requested output exceed the model's context
│   ├── PayloadTooLargeError       the body or message exceeds the size limit
│   └── UnsupportedError           the request is well formed, this server does not offer it
├── UnauthenticatedError           no API key, or an unknown one
├── PermissionDeniedError          a known caller without the right
├── NotFoundError                  the named thing does not exist
│   └── UnknownModelError          no engine serves the model
├── ConflictError                  the named thing is in another state than the caller believes
│   └── IdentityMismatchError      two processes disagree on model identity, layout or hashing
├── OverloadedError                the queue is full; try later
├── QuotaExceededError             the tenant has used up what it may have for now
├── UnavailableError               no process can take the request now
│   └── DrainingError              this process is shutting down, another may take it
├── EngineLostError                the engine died after output had been delivered
├── DeadlineExceededError          the caller's deadline passed
├── RequestAbortedError            cancelled by the caller or by an operator
│   └── SlowClientError            the client read too slowly and its buffer filled
├── DataCorruptError               stored or received bytes fail their checksum
├── SettingsError                  a process cannot start as configured (exit code 2)
│   ├── AddressInUseError          a listening address is taken or cannot be bound
│   └── ModelFolderError           a model folder lacks files or holds wrong tensors
└── InternalError                  a defect; the log of the process holds the same id

`OUTCOMES` is the one table from class to gRPC status, HTTP status and retryability. gRPC statuses stand
here by name, so that this module imports nothing; `rpc_errors` turns them into `grpc.StatusCode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

__all__ = [
    "OUTCOMES",
    "AddressInUseError",
    "ConflictError",
    "DataCorruptError",
    "DeadlineExceededError",
    "DrainingError",
    "EngineLostError",
    "IdentityMismatchError",
    "InternalError",
    "InvalidRequestError",
    "KatydidError",
    "ModelFolderError",
    "NotFoundError",
    "Outcome",
    "OverloadedError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PromptTooLongError",
    "QuotaExceededError",
    "RequestAbortedError",
    "SettingsError",
    "SlowClientError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownModelError",
    "UnsupportedError",
    "error_from_details",
]

_VALUE_LIMIT = 128
_MESSAGE_LIMIT = 1024


class KatydidError(Exception):
    """Base of every deliberate error.

    `message` is a whole sentence for the person who made the request. `field` names what is wrong as the caller
    spelled it ("temperature", "messages[2].role"), `value` what was given, `allowed` what would have been accepted.
    Values are shortened to 128 characters and messages to 1,024, so a prompt never travels inside an error.
    """

    reason: ClassVar[str] = "KATYDID_ERROR"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        allowed: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        message = _shorten(message, _MESSAGE_LIMIT)
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = None if value is None else _shorten(value, _VALUE_LIMIT)
        self.allowed = allowed
        self.retry_after_s = retry_after_s

    @property
    def outcome(self) -> Outcome:
        """The row of `OUTCOMES` for this class, or for the nearest base of one defined elsewhere."""
        return next(OUTCOMES[base] for base in type(self).__mro__ if base in OUTCOMES)

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later or elsewhere, provided nothing of its answer was delivered."""
        return self.outcome.retryable

    def details(self) -> dict[str, str]:
        """The structured part as strings: what travels beside reason and message. Inverse: `error_from_details`."""
        details = {"retryable": "true" if self.retryable else "false"}
        if self.field is not None:
            details["field"] = self.field
        if self.value is not None:
            details["value"] = self.value
        if self.allowed is not None:
            details["allowed"] = self.allowed
        if self.retry_after_s is not None:
            details["retry_after_s"] = f"{self.retry_after_s:g}"
        return details

    @classmethod
    def from_details(cls, message: str, details: Mapping[str, str]) -> Self:
        """Rebuild an error of this class from its message and `details()`; unknown keys are ignored."""
        return cls(
            message,
            field=details.get("field"),
            value=details.get("value"),
            allowed=details.get("allowed"),
            retry_after_s=_seconds(details.get("retry_after_s")),
        )


class InvalidRequestError(KatydidError):
    reason = "INVALID_REQUEST"


class PromptTooLongError(InvalidRequestError):
    reason = "PROMPT_TOO_LONG"


class PayloadTooLargeError(InvalidRequestError):
    reason = "PAYLOAD_TOO_LARGE"


class UnsupportedError(InvalidRequestError):
    reason = "UNSUPPORTED"


class UnauthenticatedError(KatydidError):
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(KatydidError):
    reason = "PERMISSION_DENIED"


class NotFoundError(KatydidError):
    reason = "NOT_FOUND"


class UnknownModelError(NotFoundError):
    reason = "UNKNOWN_MODEL"


class ConflictError(KatydidError):
    reason = "CONFLICT"


class IdentityMismatchError(ConflictError):
    reason = "IDENTITY_MISMATCH"


class OverloadedError(KatydidError):
    reason = "OVERLOADED"


class QuotaExceededError(KatydidError):
    reason = "QUOTA_EXCEEDED"


class UnavailableError(KatydidError):
    reason = "UNAVAILABLE"


class DrainingError(UnavailableError):
    reason = "DRAINING"


class EngineLostError(KatydidError):
    reason = "ENGINE_LOST"


class DeadlineExceededError(KatydidError):
    reason = "DEADLINE_EXCEEDED"


class RequestAbortedError(KatydidError):
    reason = "REQUEST_ABORTED"


class SlowClientError(RequestAbortedError):
    reason = "SLOW_CLIENT"


class DataCorruptError(KatydidError):
    reason = "DATA_CORRUPT"


class SettingsError(KatydidError):
    reason = "SETTINGS"


class AddressInUseError(SettingsError):
    reason = "ADDRESS_IN_USE"


class ModelFolderError(SettingsError):
    reason = "MODEL_FOLDER"


class InternalError(KatydidError):
    """A defect. `error_id` is the id under which the process that failed logged the traceback."""

    reason = "INTERNAL"

    def __init__(self, message: str, *, error_id: str | None = None) -> None:
        super().__init__(message)
        self.error_id = error_id

    def details(self) -> dict[str, str]:
        return super().details() | ({} if self.error_id is None else {"error_id": self.error_id})

    @classmethod
    def from_details(cls, message: str, details: Mapping[str, str]) -> Self:
        return cls(message, error_id=details.get("error_id"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an error is outside the process: gRPC status name, HTTP status, and whether a retry can help."""

    grpc_status: str
    http_status: int
    retryable: bool


OUTCOMES: dict[type[KatydidError], Outcome] = {
    KatydidError: Outcome("UNKNOWN", 500, False),
    InvalidRequestError: Outcome("INVALID_ARGUMENT", 400, False),
    PromptTooLongError: Outcome("INVALID_ARGUMENT", 400, False),
    PayloadTooLargeError: Outcome("INVALID_ARGUMENT", 413, False),
    UnsupportedError: Outcome("UNIMPLEMENTED", 501, False),
    UnauthenticatedError: Outcome("UNAUTHENTICATED", 401, False),
    PermissionDeniedError: Outcome("PERMISSION_DENIED", 403, False),
    NotFoundError: Outcome("NOT_FOUND", 404, False),
    UnknownModelError: Outcome("NOT_FOUND", 404, False),
    ConflictError: Outcome("FAILED_PRECONDITION", 409, False),
    IdentityMismatchError: Outcome("FAILED_PRECONDITION", 409, False),
    OverloadedError: Outcome("RESOURCE_EXHAUSTED", 503, True),
    QuotaExceededError: Outcome("RESOURCE_EXHAUSTED", 429, True),
    UnavailableError: Outcome("UNAVAILABLE", 503, True),
    DrainingError: Outcome("UNAVAILABLE", 503, True),
    EngineLostError: Outcome("ABORTED", 502, False),
    DeadlineExceededError: Outcome("DEADLINE_EXCEEDED", 504, False),
    RequestAbortedError: Outcome("CANCELLED", 499, False),
    SlowClientError: Outcome("CANCELLED", 499, False),
    DataCorruptError: Outcome("DATA_LOSS", 500, False),
    SettingsError: Outcome("FAILED_PRECONDITION", 500, False),
    AddressInUseError: Outcome("FAILED_PRECONDITION", 500, False),
    ModelFolderError: Outcome("FAILED_PRECONDITION", 500, False),
    InternalError: Outcome("INTERNAL", 500, False),
}

_BY_REASON = {error_class.reason: error_class for error_class in OUTCOMES}


def error_from_details(reason: str, message: str, details: Mapping[str, str]) -> KatydidError:
    """The error that another process described by (`reason`, `str(error)`, `error.details()`).

    A reason this version does not know comes back as the base class, so an older reader still gets the message.
    """
    return _BY_REASON.get(reason, KatydidError).from_details(message, details)


def _shorten(value: object, limit: int) -> str:
    text = value if isinstance(value, str) else repr(value)
    # Half a surrogate pair, which JSON can name, is nothing that a message holds.
    text = text[: limit + 1].encode(errors="backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
