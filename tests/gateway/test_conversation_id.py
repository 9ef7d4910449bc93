"""However a caller says which conversation a request belongs to, routing groups by it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_gateway.http.conversation_id import conversation_id
from katydid_gateway.routing.router import Router

from tests.gateway.rig import rig

USER = [{"role": "user", "content": "hello"}]


def test_the_key_comes_before_the_conversation() -> None:
    assert conversation_id("k", {"conversation_id": "c"}) == "k"
    assert conversation_id(None, {"session_id": "s", "conversation_id": "c"}) == "c"
    assert conversation_id("", {"thread_id": "t", "topic": "x"}) == "t"
    assert conversation_id(None, {"session_id": 7, "user_id": "u"}) == conversation_id(None, None) == ""


def test_every_api_says_it(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    decide = Router.decide

    def noted(self: Router, prompt: Any, *rest: Any, **named: Any) -> Any:
        seen.append(prompt.affinity)
        return decide(self, prompt, *rest, **named)

    monkeypatch.setattr(Router, "decide", noted)
    header = {"x-session-id": "h"}

    async def scenario() -> None:
        async with rig(chatml) as built:
            for path, body in (
                ("chat/completions", {"messages": USER, "max_tokens": 1}),
                ("completions", {"prompt": "x", "max_tokens": 1}),
                ("responses", {"input": "x", "max_output_tokens": 1}),
                ("messages", {"messages": USER, "max_tokens": 1}),
            ):
                seen.clear()
                for fields in ({}, {"metadata": {"session_id": "s"}}, {"prompt_cache_key": "k"}):
                    for headers in ({}, header):
                        answer = await built.http.post(f"/v1/{path}", json=body | fields, headers=headers)
                        assert answer.status_code == 200, answer.text
                assert seen == ["", "h", "s", "s", "k", "k"], path
            seen.clear()
            request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), sampling=pb.SamplingOptions(max_tokens=1))
            async for _ in built.stub.Generate(request, metadata=tuple(header.items())):
                pass
            assert seen == ["h"]

    asyncio.run(scenario())
