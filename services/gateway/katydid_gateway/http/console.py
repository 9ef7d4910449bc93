"""The console: a page at /console, and what it asks for. The page itself holds nothing secret and needs no key; all it
shows comes from the API and from the routes here, which do.

Its files are served from memory under a policy that lets it load nothing from anywhere else and run nothing inline.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Protocol

import msgspec
from katydid_runtime.errors import NotFoundError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from katydid_gateway.access.scopes import Scope
from katydid_gateway.fleet_view import fleet_view
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.generation import Generator
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.failures import decode_body
from katydid_gateway.http.schema import MessageBody
from katydid_gateway.http.translate import chat_conversation
from katydid_gateway.http.usage import usage_fields
from katydid_gateway.recent_requests import RecentRequest
from katydid_gateway.requests import Caller
from katydid_gateway.routing.router import Candidate

__all__ = ["Explain", "console_routes"]

SHOWN = 50
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}

_encode = msgspec.json.Encoder().encode


class _Tenant(Protocol):
    """Who asks. Raises UnauthenticatedError for a stranger, PermissionDeniedError for one without the scope."""

    def __call__(self, request: Request, needed: Scope, /) -> Awaitable[str]: ...


def console_routes(generator: Generator, metrics: GatewayMetrics, tenant: _Tenant) -> list[Route]:
    """The page's routes: the fleet is for those who may see why requests go where, requests for those who make them."""
    pages = {
        entry.name: (entry.read_bytes(), _TYPES[entry.name.rpartition(".")[2]])
        for entry in files("katydid_gateway").joinpath("console").iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }

    async def page(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in pages:
            raise NotFoundError(f"the console has no {name}", field="path", value=request.url.path)
        content, kind = pages[name]
        return Response(content, headers={**_HEADERS, "content-type": f"{kind}; charset=utf-8"})

    async def home(_request: Request) -> Response:
        return RedirectResponse("console/", 308)

    async def fleet(request: Request) -> Response:
        await tenant(request, Scope.EXPLAIN)
        model = generator.fleet.limits.model if generator.fleet.ready else ""
        return _json(fleet_view(generator.fleet.router, metrics, model))

    async def requests(request: Request) -> Response:
        recent = generator.recent.of(await tenant(request, Scope.INFERENCE), SHOWN)
        return _json({"requests": [_recent(each) for each in recent]})

    async def one(request: Request) -> Response:
        name = request.path_params["id"]
        found = generator.recent.get(await tenant(request, Scope.INFERENCE), name)
        if found is None:
            raise NotFoundError(f"request {name!r} is not among the last ones", field="id", value=name)
        return _json(_recent(found))

    return [
        Route("/console", home),
        Route("/console/", page),
        Route("/console/api/fleet", fleet),
        Route("/console/api/requests", requests),
        Route("/console/api/requests/{id}", one),
        Route("/console/{name}", page),
    ]


class _ExplainBody(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[MessageBody]
    model: str = ""
    prompt_cache_key: str = ""
    without_engine: str = ""
    with_another: bool = False


_explain_decoder = msgspec.json.Decoder(_ExplainBody)


class Explain:
    """POST /console/api/explain: where a conversation would go now, and why; nothing is sent."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller) -> None:
        body = decode_body(_explain_decoder, raw)
        routed, decision = await self._generator.explain(
            body.model,
            chat_conversation(body.messages, None),
            body.prompt_cache_key,
            caller.tenant,
            without=body.without_engine,
            another=body.with_another,
        )
        answer = {
            "reason": decision.reason,
            "prompt_tokens": routed.tokens,
            "blocks": len(routed.chain),
            "candidates": [_candidate(candidate) for candidate in decision.candidates],
        }
        await exchange.send_json(_encode(answer))


def _candidate(candidate: Candidate) -> dict[str, Any]:
    terms = {name: _finite(value) for name, value in asdict(candidate.prediction).items()}
    return {
        "engine": candidate.holder.engine,
        "rank": candidate.holder.rank,
        "requests": candidate.requests,
        "home": candidate.home,
        "excluded": candidate.excluded,
        "ttft_s": _finite(candidate.prediction.ttft_s),
        **terms,
    }


def _recent(request: RecentRequest) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "api": request.api,
        "outcome": request.outcome,
        "received_ms": request.received_ns // 1_000_000,
        "engine": request.engine,
        "trace_id": request.trace_id,
        "ttft_s": request.ttft_s,
        "tpot_s": request.tpot_s,
        "usage": usage_fields(request.usage),
        "stretches": [asdict(stretch) for stretch in request.stretches],
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(content: object) -> Response:
    return Response(
        _encode(content),
        media_type="application/json",
        headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
    )
