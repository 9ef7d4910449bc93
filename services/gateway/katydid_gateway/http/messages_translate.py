"""Bodies of Anthropic's Messages API into the gateway's own requests."""

from __future__ import annotations

import json
import re

from katydid_runtime.errors import InvalidRequestError

from katydid_gateway.http.conversation_id import conversation_id
from katydid_gateway.http.messages_schema import (
    AssistantMessage,
    CountTokensBody,
    MessagesBody,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from katydid_gateway.requests import (
    Conversation,
    GenerationRequest,
    Message,
    OutputFormat,
    RequestOptions,
    Role,
    SamplingOptions,
    Tool,
    ToolCall,
)

__all__ = ["conversation", "messages_request"]

# Claude Code's word to Anthropic's billing, in front of its system prompt. It changes with every request: no prompt of
# an agent would begin like its last one, and no cache have any of it.
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def messages_request(body: MessagesBody, request_id: str) -> GenerationRequest:
    """Raises InvalidRequestError for combinations the types allow and the API does not."""
    sampling = SamplingOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=tuple(body.stop_sequences or ()),
        max_tokens=body.max_tokens,
        format=_format(body),
    )
    options = RequestOptions(
        priority=body.priority or 0,
        prompt_cache_key=conversation_id(body.prompt_cache_key, body.metadata),
        request_id=request_id,
    )
    return GenerationRequest(conversation(body), body.model, sampling, options)


def conversation(body: CountTokensBody) -> Conversation:
    """The messages, the system prompt first. Raises InvalidRequestError."""
    messages: list[Message] = []
    if system := _system(body.system or ""):
        messages.append(Message(Role.SYSTEM, system))
    for message in body.messages:
        messages += _messages(message)
    return Conversation(
        messages=tuple(messages),
        tools=tuple(Tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()),
        tool_choice=_tool_choice(body.tool_choice, bool(body.tools)),
        parallel_tool_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        reasoning_effort=_effort(body),
        continues=bool(messages) and _is_begun(messages[-1]),
    )


def _is_begun(message: Message) -> bool:
    """A last message of an assistant's is the beginning of its answer."""
    return message.role is Role.ASSISTANT and bool((message.content or "").strip()) and not message.tool_calls


def _messages(body: UserMessage | AssistantMessage | SystemMessage) -> list[Message]:
    if isinstance(body, SystemMessage):
        return [Message(Role.SYSTEM, _text(body.content))]
    if isinstance(body, AssistantMessage):
        return [_assistant(body)]
    if isinstance(body.content, str):
        return [Message(Role.USER, body.content)]
    results = [
        Message(Role.TOOL, _text(block.content or ""), tool_call_id=block.tool_use_id)
        for block in body.content
        if isinstance(block, ToolResultBlock)
    ]
    texts = [block for block in body.content if isinstance(block, TextBlock)]
    return [*results, Message(Role.USER, _text(texts))] if texts or not results else [*results]


def _assistant(body: AssistantMessage) -> Message:
    if isinstance(body.content, str):
        return Message(Role.ASSISTANT, body.content)
    thoughts = [block.thinking for block in body.content if isinstance(block, ThinkingBlock)]
    calls = [block for block in body.content if isinstance(block, ToolUseBlock)]
    texts = [block for block in body.content if isinstance(block, TextBlock)]
    return Message(
        Role.ASSISTANT,
        _text(texts) if texts or not calls else None,
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(
            ToolCall(place, call.id, call.name, json.dumps(call.input, ensure_ascii=False))
            for place, call in enumerate(calls)
        ),
    )


def _system(content: str | list[TextBlock]) -> str:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return "".join(_ATTRIBUTION.sub("", text) for text in texts)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool_choice(choice: ToolChoice | None, tools: bool) -> str:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if not tools:
        raise InvalidRequestError("tool_choice is set, but there are no tools", field="tool_choice")
    if choice.type == "any":
        return "required"
    if not choice.name:
        raise InvalidRequestError("tool_choice names no tool", field="tool_choice.name", allowed="a tool's name")
    return choice.name


def _effort(body: CountTokensBody) -> str | None:
    """An effort as it is said; else thinking enabled or disabled in the words that templates know, budgets left out."""
    if body.output_config is not None and body.output_config.effort is not None:
        return body.output_config.effort
    if body.thinking is None or body.thinking.type == "adaptive":
        return None
    return "high" if body.thinking.type == "enabled" else "none"


def _format(body: MessagesBody) -> OutputFormat | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    format = body.output_config.format
    schema = format.get("schema")
    if format.get("type") != "json_schema" or not isinstance(schema, dict):
        raise InvalidRequestError(
            "output_config.format is not usable",
            field="output_config.format",
            value=format.get("type"),
            allowed='{"type": "json_schema", "schema": {...}}',
        )
    return OutputFormat("json_schema", json.dumps(schema), field="output_config.format.schema")
