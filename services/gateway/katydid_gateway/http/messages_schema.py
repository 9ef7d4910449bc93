"""Bodies of Anthropic's Messages API as typed structs. What changes no answer here (cache_control, metadata, betas'
context management, ...) is accepted; other unknown fields are refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "AssistantBlock",
    "AssistantMessage",
    "CountTokensBody",
    "MessagesBody",
    "SystemMessage",
    "TextBlock",
    "Thinking",
    "ThinkingBlock",
    "ToolChoice",
    "ToolResultBlock",
    "ToolUseBlock",
    "UserMessage",
]


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Block(_Body, tag_field="type", kw_only=True):
    cache_control: dict[str, Any] | None = None


class TextBlock(_Block, tag="text", kw_only=True):
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(_Block, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, tag="redacted_thinking", kw_only=True):
    data: str = ""


class ToolUseBlock(_Block, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any] = {}
    caller: dict[str, Any] | None = None


class ToolResultBlock(_Block, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool = False


AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserMessage(_Body, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(_Body, tag_field="role", tag="assistant"):
    content: str | list[AssistantBlock]


class SystemMessage(_Body, tag_field="role", tag="system"):
    content: str | list[TextBlock]


class ToolDefinition(_Body, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(_Body, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Body, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(_Body, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensBody(_Body, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[UserMessage | AssistantMessage | SystemMessage]
    model: str = ""
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    betas: list[str] | None = None
    seed: int | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
