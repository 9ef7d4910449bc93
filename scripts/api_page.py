"""Writes docs/api.md out of the gateway's routes and bodies, the protos and the error table.

Bodies are listed field by field as the gateway's typed structs have them, and rpcs with the comments of their protos.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
import textwrap
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import descriptor_pb2 as pb
from katydid_gateway.http import app, messages_schema, responses_schema, schema, tokenization
from katydid_runtime import errors

__all__ = ["ENDPOINTS", "page", "routes"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
PROTOS = ROOT / "protos"
COMMENT = re.compile(r"^.*(buf:lint|protolint).*$", re.MULTILINE)

INTRODUCTION = """# API reference

Written by `python scripts/api_page.py` out of the code. What a field does where it is not OpenAI's or Anthropic's own
is in [the gateway](gateway.md); clients are in [the Python client](client.md).

## HTTP

Keys are shown as `Authorization: Bearer KEY` or `x-api-key: KEY` where the gateway has a file of them. A `traceparent`
header joins the caller's trace, `x-request-id` names the request in logs. Unknown fields are refused with their name.
"""


@dataclass(frozen=True)
class Endpoint:
    """One route: what it is for, and the type of its body if it has one."""

    path: str
    what: str
    body: type[msgspec.Struct] | None = None
    method: str = "GET"
    key: str = "inference"


ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions", "OpenAI's Chat Completions, streamed or whole", schema.ChatCompletionBody, method="POST"
    ),
    Endpoint("/v1/completions", "OpenAI's Completions", schema.CompletionBody, method="POST"),
    Endpoint(
        "/v1/responses", "OpenAI's Responses, none of which is kept", responses_schema.ResponsesBody, method="POST"
    ),
    Endpoint("/v1/messages", "Anthropic's Messages", messages_schema.MessagesBody, method="POST"),
    Endpoint(
        "/v1/messages/count_tokens",
        "how long a conversation is",
        messages_schema.CountTokensBody,
        method="POST",
        key="tokenize",
    ),
    Endpoint(
        "/tokenize", "token ids of text or of a conversation", tokenization.TokenizeBody, method="POST", key="tokenize"
    ),
    Endpoint("/detokenize", "text of token ids", tokenization.DetokenizeBody, method="POST", key="tokenize"),
    Endpoint("/v1/models", "the model that is served, with its context length", key="any"),
    Endpoint("/v1/models/{model:path}", "the same by its name", key="any"),
    Endpoint("/healthz", "200 while the process lives; also at `--probe-listen`", key="no"),
    Endpoint("/readyz", "200 while an engine is connected and no drain runs; also at `--probe-listen`", key="no"),
    Endpoint(
        "/metrics", "[figures](metrics.md), as Prometheus' text or OpenMetrics; also at `--probe-listen`", key="no"
    ),
)


def page() -> str:
    parts = [INTRODUCTION, "\n| | | scope of the key |\n|---|---|---|\n"]
    parts += [f"| `{each.method} {_plain(each.path)}` | {each.what} | {each.key} |\n" for each in ENDPOINTS]
    parts.append("\n`/console` and what is below it is the page of `--console`, no API.\n")
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            parts.append(f"\n### {endpoint.method} {endpoint.path}\n\n{_fields(endpoint.body)}\n")
    return "".join([*parts, _errors(), *_grpc()])


def routes() -> set[tuple[str, str]]:
    """Method and path of everything the gateway serves but its console, as the code that serves it spells them."""
    source = inspect.getsource(app.http_app)
    posts = {("POST", path) for path in re.findall(r'^        "(/[^"]+)": post\(', source, re.MULTILINE)}
    return posts | {("GET", path) for path in re.findall(r'Route\("(/[^"]+)", \w+\)', source)}


def _plain(path: str) -> str:
    return path.replace("{model:path}", "MODEL")


def _fields(body: type[msgspec.Struct]) -> str:
    """Fields with their types, first those that have to be there."""
    hints = typing.get_type_hints(body)
    required: list[str] = []
    optional: list[str] = []
    for field in msgspec.structs.fields(body):
        named = f"`{field.encode_name}` {_type(hints[field.name])}"
        (required if field.required else optional).append(named)
    told = [f"Needed: {', '.join(required)}."] if required else []
    told += [f"Optional: {', '.join(optional)}."] if optional else []
    return "\n\n".join(textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False) for text in told)


def _type(hint: Any) -> str:
    """A type in the words of JSON."""
    names = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", type(None): "null"}
    if hint is Any:
        return "anything"
    if hint in names:
        return names[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f'"{part}"' for part in parts)
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin is list:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return "object"
    if parts:
        return " or ".join(dict.fromkeys(_type(part) for part in parts if part is not type(None)))
    return "object"


def _errors() -> str:
    rows = [
        "\n## Errors\n\nOne tree for HTTP and gRPC; a retryable error says when to come again, where it is known.\n\n"
    ]
    rows.append("| reason | HTTP | gRPC | retryable | what it is |\n|---|---|---|---|---|\n")
    # The module draws the tree with a line a class.
    meanings = dict(re.findall(r"(\w+Error) {2,}(.+)", errors.__doc__ or ""))
    for kind, outcome in errors.OUTCOMES.items():
        first = meanings.get(kind.__name__, "any other")
        again = "yes" if outcome.retryable else "no"
        rows.append(f"| `{kind.reason}` | {outcome.http_status} | `{outcome.grpc_status}` | {again} | {first} |\n")
    return "".join(rows)


def _grpc() -> Iterator[str]:
    yield "\n## gRPC\n\n`grpc.health.v1` and reflection answer beside these. Fields are commented in the protos.\n"
    for file in _files():
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        for number, service in enumerate(file.service):
            yield f"\n### {file.package}.{service.name}\n\n{_sentence(comments.get((6, number), ''))}\n\n"
            yield "| rpc | takes | gives | what it does |\n|---|---|---|---|\n"
            for index, rpc in enumerate(service.method):
                takes = ("stream " if rpc.client_streaming else "") + rpc.input_type.rpartition(".")[2]
                gives = ("stream " if rpc.server_streaming else "") + rpc.output_type.rpartition(".")[2]
                what = _sentence(comments.get((6, number, 2, index), "")).replace("|", "\\|")
                yield f"| `{rpc.name}` | {takes} | {gives} | {what} |\n"


def _files() -> Iterable[pb.FileDescriptorProto]:
    sources = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.rglob("*.proto"))]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "protos.pb")
        options = [f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={out}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *sources], check=True, cwd=PROTOS)
        return pb.FileDescriptorSet.FromString(out.read_bytes()).file


def _sentence(comment: str) -> str:
    return " ".join(COMMENT.sub("", comment).split())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
