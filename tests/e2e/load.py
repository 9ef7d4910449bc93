"""Requests of many kinds, sent over HTTP or gRPC, and their outcomes in one form that can be compared."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import httpx
from katydid_client import AsyncKatydid, KatydidError

from tests.e2e.fleet import MODEL, Fleet

__all__ = ["Answer", "Ask", "Failure", "Load", "Outcome", "mixed_asks"]

REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Ask:
    """A request. `sampling` holds names that both APIs share."""

    prompt: str
    max_tokens: int = 8
    chat: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Per choice: text, finish reason and log probabilities of the chosen tokens to 3 decimals."""

    choices: tuple[tuple[str, str, tuple[float, ...]], ...]
    output_tokens: int


@dataclass(frozen=True)
class Failure:
    """A typed error by its code; `delivered` says whether output had come before."""

    code: str
    delivered: bool


Outcome: TypeAlias = Answer | Failure


class Load:
    """Sends asks to one gateway, each once: no retries on this side."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.sdk = AsyncKatydid(self._fleet.gateway.address, timeout=REQUEST_TIMEOUT_S, max_retries=0)
        await self._stack.enter_async_context(self.sdk)
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=self._fleet.base_url, timeout=REQUEST_TIMEOUT_S, limits=limits)
        await self._stack.enter_async_context(self.http)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def over_grpc(self, ask: Ask, on_output: Callable[[], None] = lambda: None, **extra: Any) -> Outcome:
        arguments = {"max_tokens": ask.max_tokens, **ask.sampling, **extra}
        messages = [{"role": "user", "content": ask.prompt}]
        delivered = False
        opened = (
            self.sdk.chat_stream(messages, **arguments)
            if ask.chat
            else self.sdk.generate_stream(ask.prompt, **arguments)
        )
        try:
            async with opened as stream:
                async for event in stream:
                    if event.token_ids:
                        delivered = True
                        on_output()
                final = await stream.get_final()
        except KatydidError as error:
            return Failure(error.reason.lower(), delivered)
        return Answer(
            tuple(
                (choice.text, str(choice.finish_reason), tuple(round(entry.logprob, 3) for entry in choice.logprobs))
                for choice in final.choices
            ),
            final.usage.completion_tokens,
        )

    async def over_http(self, ask: Ask, on_output: Callable[[], None] = lambda: None) -> Outcome:
        body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": ask.max_tokens, "return_token_ids": True} | ask.sampling
        if ask.chat:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
            if (top := body.pop("logprobs", None)) is not None:
                body |= {"logprobs": True, "top_logprobs": top}
        else:
            body["prompt"] = ask.prompt
        gathered = _Gathered()
        path = "/chat/completions" if ask.chat else "/completions"
        try:
            async with self.http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    return Failure(json.loads(await response.aread())["error"]["code"], False)
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and gathered.take(line.removeprefix("data: ")):
                        on_output()
        except httpx.TransportError as error:
            return Failure(f"transport: {type(error).__name__}", gathered.delivered)
        return gathered.outcome()

    async def all_at_once(self, asks: Sequence[Ask]) -> list[Outcome]:
        """All asks in parallel, every other one over HTTP; outcomes in order."""
        ways = (self.over_grpc, self.over_http)
        return await asyncio.gather(*(ways[place % 2](ask) for place, ask in enumerate(asks)))

    async def one_at_a_time(self, asks: Sequence[Ask]) -> list[Outcome]:
        """The reference: each alone, computed without any cache."""
        return [await self.over_grpc(ask, bypass_cache=True) for ask in asks]


class _Gathered:
    """The events of one HTTP stream."""

    def __init__(self) -> None:
        self.delivered = False
        self._texts: dict[int, str] = {}
        self._reasons: dict[int, str] = {}
        self._logprobs: dict[int, list[float]] = {}
        self._error = ""
        self._tokens = 0
        self._done = False

    def take(self, data: str) -> bool:
        """Returns whether the event carries output."""
        if data == "[DONE]":
            self._done = True
            return False
        event = json.loads(data)
        if "error" in event:
            self._error = event["error"]["code"]
            return False
        if event.get("usage"):
            self._tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            self._add(choice)
        return bool(event["choices"])

    def outcome(self) -> Outcome:
        if self._error or not self._done:
            return Failure(self._error or "truncated", self.delivered)
        choices = tuple(
            (self._texts[index], self._reasons[index], tuple(round(value, 3) for value in self._logprobs[index]))
            for index in sorted(self._texts)
        )
        return Answer(choices, self._tokens)

    def _add(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        self.delivered = self.delivered or bool(choice.get("token_ids"))
        self._texts[index] = self._texts.get(index, "") + text
        if choice["finish_reason"]:
            self._reasons[index] = choice["finish_reason"]
        columns = choice.get("logprobs") or {}
        values = columns.get("token_logprobs") or [entry["logprob"] for entry in columns.get("content") or ()]
        self._logprobs.setdefault(index, []).extend(values)


def mixed_asks(count: int, seed: int, longest_prompt: int = 900) -> list[Ask]:
    """Prompts of 1 to `longest_prompt` bytes, some with a common beginning; greedy and sampled, some with n=2, stop
    strings or log probabilities."""
    dice = random.Random(seed)
    common = _text(dice, 260)
    asks = []
    for number in range(count):
        prompt = _text(dice, round(longest_prompt ** dice.random()))
        if number % 3 == 0:
            prompt = common + prompt
        sampling: dict[str, Any] = {"temperature": (0.0, 0.8, 1.2)[number % 3], "seed": dice.randrange(2**31)}
        if number % 4 == 1:
            sampling["n"] = 2
        if number % 5 == 2:
            sampling["stop"] = list("etaoinsh")
        if number % 6 == 3:
            sampling["logprobs"] = 2
        if number % 7 == 4:
            sampling |= {"top_p": 0.9, "repetition_penalty": 1.1}
        asks.append(Ask(prompt, dice.choice((1, 5, 24, 60)), number % 8 == 5, sampling))
    return asks


def _text(dice: random.Random, length: int) -> str:
    return "".join(dice.choices("etaoin shrdlu,.\n", k=length))
