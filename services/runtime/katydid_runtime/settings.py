"""How a process is configured: one frozen class a service, filled from the command line and the environment.

A field `max_queue_tokens` of a class with prefix `KATYDID_ENGINE_` is the option `--max-queue-tokens` and the variable
`KATYDID_ENGINE_MAX_QUEUE_TOKENS`; the option wins. A variable with the prefix that names no field is an error, because
a misspelled setting that is silently ignored is found in production. In Kubernetes that asks for
`enableServiceLinks: false`: service links inject `KATYDID_ENGINE_PORT=tcp://...` of their own accord.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self, get_args

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError

from katydid_runtime.errors import SettingsError
from katydid_runtime.tls import ServerTls, Tls, client_tls, server_tls

__all__ = ["CommaSeparated", "DialingSettings", "ServiceSettings"]


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A tuple of strings, written `a,b,c` on the command line and in the environment."""


class ServiceSettings(BaseSettings):
    """What every service can be told. A service subclasses it once, sets `env_prefix` and adds its own fields.

    Every field carries its unit in its name and a `description`, which becomes the option's help text.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_ignore_empty=True, validate_default=True)

    listen: str = Field("127.0.0.1:0", description="gRPC address, host:port (port 0: any free one) or unix:/path")
    http_listen: str | None = Field(None, description="HTTP address, host:port, of /metrics, /healthz and /readyz")
    tls_cert_file: str | None = Field(None, description="PEM certificate chain: speak TLS on TCP addresses")
    tls_key_file: str | None = Field(None, description="PEM key of tls_cert_file, not encrypted")
    tls_client_ca_file: str | None = Field(None, description="PEM authority that clients need a certificate of")
    drain_timeout_s: float = Field(30.0, ge=0, description="longest wait for running requests at shutdown")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    trace_file: str | None = Field(None, description="append finished spans to this file, one JSON object a line")
    otlp_endpoint: str | None = Field(None, description="export spans to this OTLP gRPC endpoint, http://host:4317")
    trace_sample_ratio: float = Field(1.0, ge=0, le=1, description="share of requests traced when no caller decided")

    @classmethod
    def load(cls, argv: Sequence[str] = ()) -> Self:
        """Settings from command-line words and the environment.

        Raises SettingsError naming the option or variable, the value and what is allowed; `--help` prints and exits 0.
        """
        cls._refuse_unknown(os.environ)
        given = vars(_parser(cls).parse_args(list(argv)))
        try:
            return cls(**given)
        except ValidationError as error:
            raise _settings_error(cls, error, given) from None
        except SourceError as error:
            raise SettingsError(str(error)) from None

    @classmethod
    def _refuse_unknown(cls, environ: Iterable[str]) -> None:
        known = {cls.variable(name) for name in cls.model_fields}
        for variable in environ:
            if variable.startswith(cls.env_prefix()) and variable not in known:
                raise SettingsError(
                    f"environment variable {variable} names no setting of {cls.__name__}",
                    field=variable,
                    allowed=", ".join(sorted(known)),
                )

    @classmethod
    def env_prefix(cls) -> str:
        prefix = cls.model_config.get("env_prefix")
        if not prefix:
            raise TypeError(f"{cls.__name__} sets no env_prefix")
        return prefix

    @classmethod
    def variable(cls, name: str) -> str:
        """The environment variable of field `name`."""
        return cls.env_prefix() + name.upper()

    def describe(self) -> dict[str, object]:
        """All values as JSON-ready data, secrets masked: printed once at start."""
        return {
            name: str(value) if isinstance(value, SecretStr) else value for name, value in self.model_dump().items()
        }

    def server_tls(self) -> ServerTls | None:
        """How the service's addresses speak TLS; None: plain text. Raises SettingsError."""
        return server_tls(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)


class DialingSettings(ServiceSettings):
    """What a service that calls other services can be told beside."""

    tls_ca_file: str | None = Field(
        None,
        description="PEM authority of the services called: speak TLS to them, showing tls_cert_file; unset: plain text",
    )
    kvcache_token_file: str | None = Field(None, description="file of the bearer token shown to KV-cache services")

    def client_tls(self) -> Tls | None:
        """How the services this one calls are spoken to; None: plain text. Raises SettingsError."""
        return client_tls(self.tls_ca_file, self.server_tls())

    def kvcache_token(self) -> str | None:
        """The token of `kvcache_token_file`; None without it. Raises SettingsError."""
        path = self.kvcache_token_file
        if path is None:
            return None
        try:
            token = Path(path).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"kvcache_token_file={path} cannot be read: {error}", field="kvcache_token_file", value=path
            ) from error
        if not token or not token.isprintable() or not token.isascii():
            raise SettingsError(
                f"kvcache_token_file={path} holds no token", field="kvcache_token_file", value=path, allowed="one line"
            )
        return token


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parser(cls: type[ServiceSettings]) -> argparse.ArgumentParser:
    """One option a field; values stay strings, pydantic converts and judges them."""
    program = f"python -m {cls.env_prefix().rstrip('_').lower()}"
    description = (cls.__doc__ or "").split("\n", 1)[0]
    parser = _Parser(prog=program, description=description, allow_abbrev=False, exit_on_error=True)
    for name, info in cls.model_fields.items():
        parser.add_argument(
            _option(name),
            dest=name,
            default=argparse.SUPPRESS,
            help=_help(cls, name, info),
            **(
                {"action": argparse.BooleanOptionalAction}
                if info.annotation is bool
                else {"metavar": "SECRET" if _secret(info) else "VALUE"}
            ),
        )
    return parser


def _help(cls: type[ServiceSettings], name: str, info: FieldInfo) -> str:
    default = "required" if info.is_required() else f"default {info.get_default(call_default_factory=True)}"
    text = f"{info.description or ''} ({cls.variable(name)}; {default})"
    return text.replace("%", "%%")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _secret(info: FieldInfo) -> bool:
    return info.annotation is SecretStr or SecretStr in get_args(info.annotation)


def _settings_error(cls: type[ServiceSettings], error: ValidationError, given: Mapping[str, object]) -> SettingsError:
    """The first of pydantic's findings as one line in the caller's words."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if name not in cls.model_fields:
        return SettingsError(first["msg"] if not name else f"{name}: {first['msg']}", field=name or None)
    spelled = _option(name) if name in given else cls.variable(name)
    if first["type"] == "missing":
        return SettingsError(f"{_option(name)} (or {cls.variable(name)}) is required", field=name)
    if _secret(cls.model_fields[name]):
        return SettingsError(f"{spelled}: {first['msg']}", field=name)
    message = first["msg"].removeprefix("Value error, ")
    return SettingsError(f"{spelled}={first['input']}: {message}", field=name, value=first["input"], allowed=message)
