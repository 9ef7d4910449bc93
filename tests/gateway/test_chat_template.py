"""Templates render to the character as transformers renders them, and bad conversations are errors of the caller."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from katydid_gateway.requests import Conversation, Message, Role, Tool, ToolCall
from katydid_gateway.text.chat_template import ChatTemplate
from katydid_gateway.text.model_text import load_model_text
from katydid_runtime.errors import InvalidRequestError, ModelFolderError

from tests.gateway.model_folders import CHATML, HY3

HY3_TINY = (Path(__file__).resolve().parents[2] / "tools" / "hy3_tiny" / "chat_template.jinja").read_text()
FEATURES = (
    "{%- set ns = namespace(n=0) -%}\n"
    "{% for m in messages %}\n"
    "  {% if loop.first and m.role == 'system' %}\n    {% continue %}\n  {% endif %}\n"
    "  {% set ns.n = ns.n + 1 %}\n"
    "{{ bos_token }}{{ m.role | upper }}: {{ m.content | trim }}\n"
    "  {% generation %}{{ m.content }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ ns.n }}<&>"
)
MESSAGES = (
    Message(Role.SYSTEM, "be brief"),
    Message(Role.USER, "Grüße <b>&'\" 🦗\n"),
    Message(Role.ASSISTANT, "ok", reasoning="hm"),
    Message(Role.USER, "  call it  "),
)
CALLS = (
    Message(Role.ASSISTANT, None, tool_calls=(ToolCall(0, "c1", "weather", '{"city": "Köln", "days": 3}'),)),
    Message(Role.TOOL, '{"rain": true}', tool_call_id="c1"),
)
TOOL = Tool("weather", "Tells <it>", {"type": "object", "properties": {"city": {"type": "string"}}})


def reference(template: str, conversation: Conversation, **variables: object) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = []
    for message in conversation.messages:
        fields = {"role": str(message.role), "content": message.content or ""}
        if message.reasoning is not None:
            fields["reasoning_content"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
                for c in message.tool_calls
            ]
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
        messages.append(fields)
    tools = [
        {
            "type": "function",
            "function": {"name": t.name}
            | ({} if t.description is None else {"description": t.description})
            | ({} if t.parameters is None else {"parameters": t.parameters}),
        }
        for t in conversation.tools
    ]
    rendered, _ = render_jinja_template(
        conversations=[messages],
        tools=tools or None,
        chat_template=template,
        add_generation_prompt=not conversation.continues,
        continue_final_message=conversation.continues,
        **variables,
    )
    return str(rendered[0])


@pytest.mark.parametrize("template", [CHATML, HY3, HY3_TINY, FEATURES], ids=["chatml", "hy3", "hy3-tiny", "features"])
@pytest.mark.parametrize("tools", [(), (TOOL, Tool("ping"))], ids=["plain", "tools"])
def test_equal_to_transformers(template: str, tools: tuple[Tool, ...]) -> None:
    conversation = Conversation(MESSAGES + (CALLS if template in (HY3, HY3_TINY) else ()), tools)
    ours = ChatTemplate(template, {"bos_token": "<s>"}).render(conversation)
    assert ours == reference(template, conversation, bos_token="<s>")


@pytest.mark.parametrize("template", [CHATML, HY3, HY3_TINY], ids=["chatml", "hy3", "hy3-tiny"])
def test_the_last_message_is_continued_as_transformers_would(template: str) -> None:
    begun = Message(Role.ASSISTANT, "well, <|im_end|> be")
    conversation = Conversation((*MESSAGES, begun), (TOOL,), continues=True)
    ours = ChatTemplate(template, {"bos_token": "<s>"}).render(conversation)
    assert ours == reference(template, conversation, bos_token="<s>")
    assert ours.endswith("well, <|im_end|> be")


def test_a_last_message_that_is_not_shown_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequestError, match="does not show the last message") as caught:
        template.render(Conversation((*MESSAGES, Message(Role.ASSISTANT, "be")), continues=True))
    assert caught.value.field == "messages[4]"


def test_equal_to_transformers_for_a_real_tokenizer_class(chatml: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(chatml / "tokenizer.json"))
    fast.chat_template = CHATML
    messages = [{"role": "user", "content": "hello <|im_end|> there"}]
    ours = ChatTemplate(CHATML, {}).render(Conversation((Message(Role.USER, messages[0]["content"]),)))
    assert ours == fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_reasoning_effort_and_options_reach_the_template() -> None:
    template = ChatTemplate("{{ reasoning_effort }}/{{ enable_thinking }}", {})
    options = {"enable_thinking": False}
    assert template.render(Conversation(MESSAGES, reasoning_effort="high", template_options=options)) == "high/False"


def test_a_developer_speaks_as_the_system_and_no_choice_of_tools_hides_them() -> None:
    template = ChatTemplate("{{ messages[0].role }}{{ tools }}", {})
    assert template.render(Conversation((Message(Role.DEVELOPER, "x"),), (TOOL,), tool_choice="none")) == "systemNone"


def test_a_template_that_complains_is_the_callers_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render(Conversation(MESSAGES))
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__ }}", "{{ messages.append(1) }}"]
)
def test_the_sandbox_gives_nothing_away(source: str) -> None:
    template = ChatTemplate(source, {})
    try:
        text = template.render(Conversation(MESSAGES))
    except InvalidRequestError:
        return
    assert "object" not in text
    assert "class" not in text


def test_a_template_that_does_not_parse_stops_the_start() -> None:
    with pytest.raises(ModelFolderError, match="does not parse"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("conversation", "on_the_loop"),
    [
        (Conversation((Message(Role.USER, "short"),)), True),
        (Conversation((Message(Role.USER, "long " * 2000),)), False),
        (Conversation((Message(Role.ASSISTANT, "", reasoning="long " * 2000), Message(Role.USER, "go on"))), False),
        (Conversation((Message(Role.USER, "short"),), (TOOL,)), False),
    ],
    ids=["short", "long", "long reasoning", "tools"],
)
def test_what_takes_long_is_rendered_off_the_loop(
    conversation: Conversation, on_the_loop: bool, hy3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered_by = []

    def render(self: ChatTemplate, conversation: Conversation) -> str:
        rendered_by.append(threading.get_ident())
        return whole(self, conversation)

    whole = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", render)
    text = load_model_text(hy3)
    encoded = asyncio.run(text.encode(conversation))
    assert encoded.text == text.render(conversation)
    assert [thread == threading.get_ident() for thread in rendered_by] == [on_the_loop, True]
