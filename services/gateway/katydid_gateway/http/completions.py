"""POST /v1/completions: text or token ids to continue, one prompt or several, in OpenAI's older shape."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import reduce
from operator import add
from typing import Any

import msgspec
from katydid_runtime.block_hash import unpack_ids

from katydid_gateway.access.door import Door
from katydid_gateway.answer import Answer
from katydid_gateway.generation import Generator
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.failures import decode_body
from katydid_gateway.http.schema import CompletionBody
from katydid_gateway.http.shape import Shape, finite_logprob, send_answers
from katydid_gateway.http.translate import completion_requests
from katydid_gateway.http.usage import timing_fields, usage_fields
from katydid_gateway.requests import Caller, Delta, FinishedRequest, FinishReason, TokenLogprob, Usage
from katydid_gateway.text.detokenizer import Vocabulary

__all__ = ["Completions"]

_decoder = msgspec.json.Decoder(CompletionBody)


class Completions:
    """The endpoint's work behind authentication and error handling."""

    api = "completions"

    def __init__(self, generator: Generator, door: Door, keepalive_s: float, max_prompts: int) -> None:
        self._generator = generator
        self._door = door
        self._keepalive_s = keepalive_s
        self._max_prompts = max_prompts

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller) -> None:
        body = decode_body(_decoder, raw)
        requests = completion_requests(body, exchange.named(body.request_id), self._max_prompts)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._door.more_places(len(requests) - 1))
            answers = [
                await stack.enter_async_context(self._generator.answer(request, caller, self.api))
                for request in requests
            ]
            shape = _Shape(answers, body, exchange.request_id, self._generator.text.vocabulary)
            await send_answers(exchange, answers, shape, stream=bool(body.stream), keepalive_s=self._keepalive_s)


class _Shape(Shape):
    """Text to be read on; choice `i` of prompt `p` is index `p * n + i`."""

    def __init__(self, answers: list[Answer], body: CompletionBody, request_id: str, vocabulary: Vocabulary) -> None:
        super().__init__(
            id=f"cmpl-{request_id}",
            object="text_completion",
            model=answers[0].model,
            stream_options=body.stream_options,
        )
        self._answers = answers
        self._body = body
        self._vocabulary = vocabulary
        self._hidden = {vocabulary.raw(token).decode() for token in vocabulary.special}
        self._n = body.n or 1
        self._prompt_only = body.max_tokens == 0
        self._offsets: dict[int, int] = {}

    def chunk(self, place: int, delta: Delta) -> bytes:
        """The first event of a choice is led by its prompt when that is to be echoed."""
        index = place * self._n + delta.index
        begins = self._body.echo and index not in self._offsets
        if not (begins or delta.text or delta.logprobs or delta.finish or (self._body.return_token_ids and delta.ids)):
            return b""
        return self.event(self.choice(place, delta))

    def choice(self, place: int, delta: Delta) -> dict[str, Any]:
        index = place * self._n + delta.index
        answer = self._answers[place]
        prompt = self._prompt(answer) if self._body.echo and index not in self._offsets else ""
        offset = self._offsets.get(index, 0)
        shown = "" if self._prompt_only else delta.text
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt + shown,
            "finish_reason": delta.finish,
            "logprobs": None,
        }
        if self._prompt_only and delta.finish is not None:
            choice["finish_reason"] = FinishReason.LENGTH
        if self._body.logprobs is not None:
            entries = [] if self._prompt_only else delta.logprobs
            echoed = self._prompt_entries(answer) if prompt else []
            choice["logprobs"] = self._logprobs([*echoed, *entries], offset)
        if self._body.return_token_ids:
            choice["token_ids"] = unpack_ids(delta.ids).tolist()
        self._offsets[index] = offset + len(prompt) + len(shown)
        return choice

    def _prompt(self, answer: Answer) -> str:
        return answer.prompt_text or self._vocabulary.decode(unpack_ids(answer.prompt_ids))

    def _prompt_entries(self, answer: Answer) -> list[TokenLogprob | str]:
        """The first prompt token has no probability: nothing came before it."""
        first = unpack_ids(answer.prompt_ids)[0]
        return [self._vocabulary.raw(first).decode("utf-8", "replace"), *answer.prompt_logprobs]

    def _logprobs(self, entries: list[TokenLogprob | str], offset: int) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            known = isinstance(entry, TokenLogprob)
            text = entry.text if isinstance(entry, TokenLogprob) else entry
            columns["tokens"].append(text)
            columns["token_logprobs"].append(finite_logprob(entry.logprob) if isinstance(entry, TokenLogprob) else None)
            columns["top_logprobs"].append(_top(entry) if known else None)
            columns["text_offset"].append(offset)
            offset += 0 if text in self._hidden else len(text)
        return columns

    def used(self) -> Usage:
        return reduce(add, [answer.usage for answer in self._answers])

    def account(self) -> dict[str, Any]:
        results = [answer.result for answer in self._answers]
        usage = reduce(add, [self._usage(result) for result in results])
        slowest = max(results, key=lambda result: result.timing.ttft_s)
        return {"usage": usage_fields(usage), "timing": timing_fields(slowest.timing)}

    def _usage(self, result: FinishedRequest) -> Usage:
        usage = result.usage
        return Usage(usage.prompt_tokens, 0, usage.cached) if self._prompt_only else usage


def _top(entry: TokenLogprob | str) -> dict[str, float]:
    if isinstance(entry, str):
        return {}
    return {other.text: finite_logprob(other.logprob) for other in entry.top}
