"""Routes of the gateway's HTTP side, and what surrounds every one: authentication, limits, errors as its API spells."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import msgspec
from katydid_runtime.errors import KatydidError, NotFoundError, RequestAbortedError, SlowClientError, UnknownModelError
from katydid_runtime.rpc_errors import internal_error
from katydid_runtime.trace_context import TraceContext
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from katydid_gateway.access.door import Door
from katydid_gateway.access.scopes import Scope as Allowed
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.generation import Generator
from katydid_gateway.http.chat import ChatCompletions
from katydid_gateway.http.completions import Completions
from katydid_gateway.http.console import Explain, console_routes
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.failures import OPENAI_ERRORS, ErrorWords, error_response
from katydid_gateway.http.messages import ANTHROPIC_ERRORS, CountTokens, Messages
from katydid_gateway.http.responses import RESPONSES_ERRORS, Responses
from katydid_gateway.http.tokenization import Detokenize, Tokenize
from katydid_gateway.requests import Caller
from katydid_gateway.settings import GatewaySettings

__all__ = ["http_app"]

logger = logging.getLogger(__name__)


class _Work(Protocol):
    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller) -> None: ...


class _Post:
    """An endpoint as an ASGI application: everything around `work.handle`."""

    def __init__(
        self,
        work: _Work,
        door: Door,
        max_body_bytes: int,
        errors: ErrorWords = OPENAI_ERRORS,
        needed: Allowed = Allowed.INFERENCE,
    ) -> None:
        self._work = work
        self._door = door
        self._needed = needed
        self._max_body_bytes = max_body_bytes
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_ns, began_ns = time.time_ns(), time.monotonic_ns()
        exchange = Exchange(scope, receive, send)
        exchange.errors = self._errors
        try:
            header = exchange.header
            shown = _authorization(header(b"authorization"), header(b"x-api-key"))
            tenant = await self._door.tenant(shown, self._needed)
            with self._door.place(tenant):
                raw = await exchange.body(self._max_body_bytes)
                trace = TraceContext.parse(header(b"traceparent"), header(b"tracestate"))
                caller = Caller(received_ns, tenant, trace, session=header(b"x-session-id"), began_ns=began_ns)
                await self._work.handle(exchange, raw, caller)
        except RequestAbortedError as error:
            # A slow client gets the reason if it comes back in time; of one that left nobody is there to tell.
            if isinstance(error, SlowClientError):
                await exchange.send_error(error)
        except KatydidError as error:
            await exchange.send_error(error)
        except Exception as error:
            await exchange.send_error(internal_error(error, f"HTTP {scope['path']}"))


def _authorization(authorization: str, api_key: str) -> str:
    """The key where OpenAI's clients put it, or where Anthropic's do."""
    return authorization or (f"Bearer {api_key}" if api_key else "")


def http_app(
    settings: GatewaySettings, generator: Generator, fleet: Fleet, door: Door, metrics: GatewayMetrics
) -> ASGIApp:
    """The ASGI application."""
    keepalive_s = settings.sse_keepalive_s
    started = int(time.time())

    def post(work: _Work, errors: ErrorWords = OPENAI_ERRORS, needed: Allowed = Allowed.INFERENCE) -> _Post:
        return _Post(work, door, settings.max_body_bytes, errors, needed)

    async def list_models(request: Request) -> Response:
        await tenant(request)
        return _json({"object": "list", "data": [_model(fleet, started)]})

    async def get_model(request: Request) -> Response:
        await tenant(request)
        asked, known = request.path_params["model"], fleet.limits.model
        if asked != known:
            raise UnknownModelError(
                f"the model {asked!r} does not exist here", field="model", value=asked, allowed=known
            )
        return _json(_model(fleet, started))

    async def alive(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_request: Request) -> Response:
        if generator.draining or not fleet.ready:
            return PlainTextResponse("draining\n" if generator.draining else "no engine is connected\n", 503)
        return PlainTextResponse("ready\n")

    async def exposition(request: Request) -> Response:
        if settings.metrics_need_scope:
            await tenant(request, Allowed.METRICS)
        text, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def tenant(request: Request, needed: Allowed | None = None) -> str:
        shown = _authorization(request.headers.get("authorization", ""), request.headers.get("x-api-key", ""))
        return await door.tenant(shown, needed)

    posts = {
        "/v1/chat/completions": post(ChatCompletions(generator, keepalive_s)),
        "/v1/completions": post(Completions(generator, door, keepalive_s, settings.max_prompts)),
        "/v1/responses": post(Responses(generator, keepalive_s), RESPONSES_ERRORS),
        "/v1/messages": post(Messages(generator, keepalive_s), ANTHROPIC_ERRORS),
        "/v1/messages/count_tokens": post(CountTokens(generator), ANTHROPIC_ERRORS, Allowed.TOKENIZE),
        "/tokenize": post(Tokenize(generator), needed=Allowed.TOKENIZE),
        "/detokenize": post(Detokenize(generator), needed=Allowed.TOKENIZE),
    }
    console: list[Route] = []
    if settings.console:
        console = console_routes(generator, metrics, tenant)
        posts["/console/api/explain"] = post(Explain(generator), needed=Allowed.EXPLAIN)
    rest = Starlette(
        routes=[
            *(Route(path, work, methods=["POST"]) for path, work in posts.items()),
            Route("/v1/models", list_models),
            Route("/v1/models/{model:path}", get_model),
            Route("/healthz", alive),
            Route("/readyz", ready),
            Route("/metrics", exposition),
            *console,
        ],
        exception_handlers={KatydidError: _on_katydid_error, HTTPException: _on_http_error},
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # The APIs' own requests need no router and none of the layers around it, which take a tenth of a small one.
        work = posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (work or rest)(scope, receive, send)

    return app


def _model(fleet: Fleet, started: int) -> dict[str, object]:
    limits = fleet.limits
    return {
        "id": limits.model,
        "object": "model",
        "created": started,
        "owned_by": "katydid",
        "max_model_len": limits.max_model_tokens,
    }


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _on_katydid_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, KatydidError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure = NotFoundError(
        f"there is no {request.method} {request.url.path}",
        field="path",
        value=request.url.path,
        allowed=(error.headers or {}).get("Allow"),
    )
    response = error_response(failure)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response
