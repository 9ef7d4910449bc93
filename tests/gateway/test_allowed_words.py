"""Words that a body's type allows, found by path."""

from __future__ import annotations

import msgspec
import pytest
from katydid_gateway.http.allowed_words import allowed_words
from katydid_gateway.http.failures import decode_body
from katydid_gateway.http.messages_schema import MessagesBody
from katydid_gateway.http.responses_schema import ResponsesBody
from katydid_gateway.http.schema import ChatCompletionBody
from katydid_runtime.errors import InvalidRequestError

USER = '"messages": [{"role": "user", "content": "x"}]'


@pytest.mark.parametrize(
    ("body", "raw", "field", "allowed"),
    [
        (
            ChatCompletionBody,
            '{"messages": [{"role": "alien"}]}',
            "messages[0].role",
            "assistant, developer, system, tool or user",
        ),
        (ChatCompletionBody, f'{{{USER}, "tool_choice": "maybe"}}', "tool_choice", "auto, none or required"),
        (ChatCompletionBody, f'{{{USER}, "modalities": ["audio"]}}', "modalities[0]", "text"),
        (
            ChatCompletionBody,
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "messages[0].content[0].type",
            "refusal or text",
        ),
        (ResponsesBody, '{"input": "x", "truncation": "auto"}', "truncation", "disabled"),
        (
            MessagesBody,
            '{"max_tokens": 1, "messages": [{"role": "elf", "content": "x"}]}',
            "messages[0].role",
            "assistant, system or user",
        ),
    ],
)
def test_a_wrong_word_is_told_with_those_allowed(body, raw, field, allowed):
    with pytest.raises(InvalidRequestError) as caught:
        decode_body(msgspec.json.Decoder(body), raw.encode())
    assert (caught.value.field, caught.value.allowed) == (field, allowed)


def test_where_any_value_may_be_no_word_is_named():
    assert allowed_words(ChatCompletionBody, "model") is None
    assert allowed_words(ChatCompletionBody, "nothing.there[3]") is None
