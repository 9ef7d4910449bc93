"""What a gateway can be told: one frozen class, filled from options and KATYDID_GATEWAY_* variables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from katydid_runtime.fault_delays import delays_at
from katydid_runtime.settings import CommaSeparated
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode, SettingsConfigDict

from katydid_gateway.access_settings import AccessSettings

__all__ = ["ENGINE_NAMES", "EngineAddress", "GatewaySettings", "is_engine_name"]

# Names are shown in metrics, logs and the console; an address is one too.
ENGINE_NAMES = "1 to 128 letters, digits and ._:/[]@-"
_ENGINE_NAME = re.compile(r"[A-Za-z0-9._:/\[\]@-]{1,128}")


def is_engine_name(name: str) -> bool:
    """Whether an engine may be called so."""
    return _ENGINE_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine of the fleet: a name for metrics, logs and routing, and where it listens."""

    name: str
    address: str


def _some_engine(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError("at least one engine address is needed")
    names = [_engine(item).name for item in value]
    for name in names:
        if not is_engine_name(name):
            raise ValueError(f"{name!r} is no name of an engine; allowed: {ENGINE_NAMES}")
    if len(set(names)) != len(names):
        raise ValueError("two engines have one name")
    return value


def _engine(item: str) -> EngineAddress:
    name, separator, address = item.partition("=")
    return EngineAddress(name, address) if separator else EngineAddress(item, item)


class GatewaySettings(AccessSettings):
    """Serves the OpenAI HTTP API and katydid.gateway.v1 in front of a fleet of engines."""

    model_config = SettingsConfigDict(env_prefix="KATYDID_GATEWAY_")

    listen: str = Field("127.0.0.1:8001", description="gRPC address, host:port (port 0: any free one) or unix:/path")
    http_listen: str = Field("127.0.0.1:8000", description="HTTP address of the API, /healthz, /readyz, /metrics")
    probe_listen: str | None = Field(
        None,
        description="one more HTTP address, of /metrics, /healthz and /readyz alone, without TLS or keys: "
        "for probes and scrapes",
    )
    model: str = Field(
        description="model folder: tokenizer.json, chat template, generation_config.json; no weights needed"
    )
    engines: Annotated[CommaSeparated, AfterValidator(_some_engine)] = Field(
        description="engines, comma separated, each ADDRESS or NAME=ADDRESS"
    )
    kvcache_address: str | None = Field(
        None,
        description="instances of the KV-cache service, whose block events refine routing: HOST:PORT,..., unix:/path, "
        "dns:NAME:PORT or file:PATH",
    )
    index_bytes: int = Field(
        256 * 2**20, ge=2**20, description="memory for what is known of engines' and cache instances' blocks"
    )
    cache_salt_secret: SecretStr | None = Field(None, description="HMAC key that separates tenants' cached blocks")
    public_blocks: int = Field(0, ge=0, description="leading 64-token blocks that tenants share despite the secret")
    tool_format: Literal["auto", "none", "hy3", "hermes", "llama"] = Field(
        "auto", description="how the model writes tool calls and reasoning"
    )
    max_body_bytes: int = Field(8 * 2**20, gt=0, description="largest HTTP body")
    max_requests: int = Field(4096, gt=0, description="most requests in flight; more are refused with 503")
    max_queued: int = Field(1024, ge=0, description="most requests that wait here for an engine; more get 503")
    engine_queue_s: float = Field(
        2.0, gt=0, description="seconds of prompts that may wait in an engine; beyond, requests wait here, fairly"
    )
    ttft_limit_s: float = Field(
        0.0, ge=0, description="requests whose predicted time to first token is longer get 503 at once; 0: none"
    )
    max_prompts: int = Field(64, gt=0, description="most prompts in one completions request")
    client_buffer_bytes: int = Field(256 * 1024, gt=0, description="output kept for a slow reader before it is cut off")
    token_cache_bytes: int = Field(256 * 2**20, ge=0, description="memory for ids of text segments seen before")
    chain_cache_bytes: int = Field(32 * 2**20, ge=0, description="memory for block hashes of prompts seen before")
    resume: bool = Field(True, description="answers whose engine dies in mid-stream go on, token-exact, on another")
    request_timeout_s: float = Field(7200.0, gt=0, description="longest run of a request whose caller set no deadline")
    capture_file: str | None = Field(
        None, description="append lengths and hashes of finished requests here, for `katydid simulate --trace`"
    )
    capture_bytes: int = Field(2**30, gt=0, description="the capture grows no further than this")
    console: bool = Field(True, description="serve the page at /console: chat, traces, the fleet as it is now")
    vllm_metric_names: bool = Field(False, description="show latencies under vLLM's names (vllm:...) as well")
    scaling_start_s: float = Field(
        240.0, ge=0, description="time from the wish for an engine to its first request, for desired_replicas"
    )
    scaling_hold_s: float = Field(600.0, ge=0, description="desired_replicas does not fall below its highest this long")
    sse_keepalive_s: float = Field(15.0, gt=0, description="comment line into a silent event stream this often")
    fault_delays: Annotated[
        dict[str, float], NoDecode, BeforeValidator(delays_at("tokenise", "route", "transport"))
    ] = Field({}, description="for tests: delays, point:milliseconds,... at tokenise, route, transport")

    def of_one_process(self) -> Self:
        """The same for one of several processes: what is given to the gateway as a whole is divided."""
        divided = (
            "max_requests",
            "max_queued",
            "token_cache_bytes",
            "chain_cache_bytes",
            "index_bytes",
            "capture_bytes",
        )
        return self.model_copy(update={name: -(-getattr(self, name) // self.processes) for name in divided})

    def engine_addresses(self) -> tuple[EngineAddress, ...]:
        """The fleet in the order given."""
        return tuple(_engine(item) for item in self.engines)
