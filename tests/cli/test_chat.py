"""The terminal chat with a scripted user and a client without sockets."""

from __future__ import annotations

import io

import pytest
from google.protobuf.duration_pb2 import Duration
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_cli.chat import ChatOptions, chat
from katydid_client import Katydid, MockTransport, UnavailableError
from katydid_runtime.errors import PromptTooLongError
from rich.console import Console

OPTIONS = ChatOptions("nowhere:1", None, "", "Be brief.", 16, 0.0, 7)


def answer(text: str):
    return [
        pb.ChatResponse(reasoning_content="hm "),
        pb.ChatResponse(content=text[:2]),
        pb.ChatResponse(
            content=text[2:],
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(
                prompt_tokens=70, completion_tokens=5, cached_tokens=64, cached_by_tier=pb.CachedTokens(memory=64)
            ),
            timing=pb.Timing(ttft=Duration(nanos=84_000_000), tpot=Duration(nanos=31_200_000), engine="engine-0"),
        ),
    ]


def talk(monkeypatch, script: str, handler, options: ChatOptions = OPTIONS):
    """Run the chat with `script` as stdin; returns exit code, output and the requests sent."""
    transport = MockTransport(handler)
    out = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    code = chat(options, console=Console(file=out, width=200), client=Katydid(transport=transport))
    requests = [request for method, request, _ in transport.calls if method == "Chat"]
    return code, out.getvalue(), requests


def respond(method, request):
    return pb.ListModelsResponse(models=[pb.Model(id="m")]) if method == "ListModels" else answer("Hello!")


def test_answers_costs_and_memory_of_the_conversation(monkeypatch):
    code, text, (first, second) = talk(monkeypatch, "Hi\n\nAgain\n/quit\nnever\n", respond)
    assert code == 0
    assert text.count("Hello!") == 2
    assert "TTFT 84 ms · TPOT 31.2 ms · 70 prompt tokens, 64 cached (memory 64) · 5 output tokens · engine-0" in text
    assert [m.content for m in first.messages] == ["Be brief.", "Hi"]
    assert [m.content for m in second.messages] == ["Be brief.", "Hi", "Hello!", "Again"]
    assert (first.sampling.max_tokens, first.sampling.temperature, first.sampling.seed) == (16, 0.0, 7)


def test_reset_forgets(monkeypatch):
    _, _, (_, second) = talk(monkeypatch, "Hi\n/reset\nAgain\n", respond)
    assert [m.content for m in second.messages] == ["Be brief.", "Again"]


def test_an_error_is_shown_and_the_conversation_goes_on(monkeypatch):
    failures = [PromptTooLongError("the prompt is too long")]

    def handler(method, request):
        if method == "Chat" and failures:
            raise failures.pop()
        return respond(method, request)

    code, text, (_, second) = talk(monkeypatch, "Hi\nAgain\n", handler)
    assert "the prompt is too long" in text
    assert [m.content for m in second.messages] == ["Be brief.", "Again"]
    assert code == 1


def test_what_can_be_said_again_says_so(monkeypatch):
    def handler(method, request):
        if method == "Chat":
            raise UnavailableError("no engine can take the request", retry_after_s=1000)
        return respond(method, request)

    _, text, _ = talk(monkeypatch, "Hi\n", handler)
    assert "no engine can take the request; this message is forgotten: send it again in a moment" in text


def test_no_gateway_is_an_error(monkeypatch):
    def handler(method, request):
        raise UnavailableError("no gateway", retry_after_s=1000)

    with pytest.raises(UnavailableError):
        talk(monkeypatch, "Hi\n", handler)
