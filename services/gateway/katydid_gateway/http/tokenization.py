"""POST /tokenize and /detokenize: what a prompt is in token ids, and back, as other open servers spell it."""

from __future__ import annotations

from typing import Any

import msgspec
from katydid_runtime.block_hash import unpack_ids
from katydid_runtime.errors import InvalidRequestError

from katydid_gateway.generation import Generator
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.failures import decode_body
from katydid_gateway.http.schema import MessageBody, ToolBody
from katydid_gateway.http.translate import chat_conversation, packed_ids
from katydid_gateway.requests import Caller, Prompt, TextPrompt

__all__ = ["Detokenize", "Tokenize"]

_encode = msgspec.json.Encoder().encode


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Text, or a conversation, which is rendered up to where the answer begins."""

    model: str = ""
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[Any]
    model: str = ""


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


class Tokenize:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def handle(self, exchange: Exchange, raw: bytes, _caller: Caller) -> None:
        body = decode_body(_tokenize_decoder, raw)
        encoded = await self._generator.encode(body.model, _prompt(body))
        ids = unpack_ids(encoded.ids).tolist()
        answer: dict[str, object] = {
            "count": len(ids),
            "max_model_len": self._generator.fleet.limits.max_model_tokens,
            "tokens": ids,
        }
        if body.return_token_strs:
            vocabulary = self._generator.text.vocabulary
            answer["token_strs"] = [vocabulary.raw(token).decode("utf-8", "replace") for token in ids]
        await exchange.send_json(_encode(answer))


class Detokenize:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def handle(self, exchange: Exchange, raw: bytes, _caller: Caller) -> None:
        body = decode_body(_detokenize_decoder, raw)
        exchange.spelled = {"prompt": "tokens"}
        text = self._generator.decode(body.model, packed_ids(body.tokens, "tokens"))
        await exchange.send_json(_encode({"prompt": text}))


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError(
            "either prompt or messages is needed", field="prompt", allowed="one of prompt and messages"
        )
    if body.messages is not None:
        return chat_conversation(body.messages, body.tools, template_options=body.chat_template_kwargs)
    return TextPrompt(body.prompt or "", special_tokens=body.add_special_tokens)
