"""Bodies of the OpenAI API into the gateway's own requests."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from katydid_runtime.block_hash import pack_ids
from katydid_runtime.errors import InvalidRequestError

from katydid_gateway.http.conversation_id import conversation_id
from katydid_gateway.http.output_formats import output_format
from katydid_gateway.http.schema import (
    ChatCompletionBody,
    CompletionBody,
    MessageBody,
    NamedToolChoice,
    RefusalPart,
    ToolBody,
)
from katydid_gateway.requests import (
    Conversation,
    GenerationRequest,
    Message,
    Prompt,
    RequestOptions,
    Role,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
)
from katydid_gateway.validation import check_template_options

__all__ = ["chat_conversation", "chat_request", "completion_requests", "packed_ids"]

# OpenAI's, without max_tokens; of chats there is no such default.
USUAL_COMPLETION_TOKENS = 16
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
# No vocabulary has more; Python refuses to read numbers of thousands of digits.
_ID_DIGITS = 18


def chat_request(body: ChatCompletionBody, request_id: str) -> GenerationRequest:
    """Raises InvalidRequestError for combinations the types allow and the API does not."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens contradict each other", field="max_completion_tokens"
        )
    _check_stream_options(body)
    conversation = chat_conversation(
        body.messages,
        body.tools,
        _tool_choice(body),
        body.reasoning_effort,
        body.chat_template_kwargs,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    sampling = _sampling(body, limit, _chat_logprobs(body), False)
    return GenerationRequest(conversation, body.model, sampling, _options(body, request_id))


def chat_conversation(
    messages: list[MessageBody],
    tools: list[ToolBody] | None,
    tool_choice: str = "auto",
    reasoning_effort: str | None = None,
    template_options: dict[str, Any] | None = None,
    *,
    parallel_tool_calls: bool = True,
) -> Conversation:
    """Raises InvalidRequestError for template options that are not the caller's to set."""
    check_template_options(template_options or {}, "chat_template_kwargs")
    return Conversation(
        messages=tuple(_message(message) for message in messages),
        tools=tuple(
            Tool(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools or ()
        ),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        reasoning_effort=reasoning_effort,
        template_options=template_options or {},
    )


def completion_requests(body: CompletionBody, request_id: str, max_prompts: int) -> list[GenerationRequest]:
    """One request a prompt. Raises InvalidRequestError."""
    if body.suffix:
        raise InvalidRequestError("suffix is not supported by this model", field="suffix")
    if body.best_of not in (None, 1, body.n):
        raise InvalidRequestError(
            "best_of is not supported", field="best_of", value=body.best_of, allowed="the value of n"
        )
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_COMPLETION_LOGPROBS:
        raise _range("logprobs", body.logprobs, MAX_COMPLETION_LOGPROBS)
    _check_stream_options(body)
    prompts = _prompts(body.prompt)
    if len(prompts) > max_prompts:
        raise InvalidRequestError(
            f"{len(prompts)} prompts", field="prompt", value=len(prompts), allowed=f"at most {max_prompts} prompts"
        )
    # Zero new tokens is how evaluators ask for the prompt's own log probabilities; an engine samples at least one.
    limit = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
    prompt_logprobs = bool(body.echo) and body.logprobs is not None
    sampling = replace(_sampling(body, limit, body.logprobs, prompt_logprobs), usual_tokens=USUAL_COMPLETION_TOKENS)
    names = [request_id] if len(prompts) == 1 else [f"{request_id}-{place}" for place in range(len(prompts))]
    return [
        GenerationRequest(prompt, body.model, sampling, _options(body, name))
        for prompt, name in zip(prompts, names, strict=True)
    ]


def _message(body: MessageBody) -> Message:
    content = body.content if body.content is not None else body.refusal
    if isinstance(content, list):
        content = "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
    reasoning = body.reasoning_content if body.reasoning_content is not None else body.reasoning
    return Message(
        role=Role(body.role),
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(place, call.id, call.function.name, call.function.arguments)
            for place, call in enumerate(body.tool_calls or ())
        ),
        tool_call_id=body.tool_call_id,
        name=body.name,
    )


def _tool_choice(body: ChatCompletionBody) -> str:
    if body.tool_choice is None:
        return "auto"
    if isinstance(body.tool_choice, NamedToolChoice):
        return body.tool_choice.function.name
    if body.tool_choice != "none" and not body.tools:
        raise InvalidRequestError("tool_choice is set, but there are no tools", field="tool_choice")
    return body.tool_choice


def _chat_logprobs(body: ChatCompletionBody) -> int | None:
    if body.top_logprobs is None:
        return 0 if body.logprobs else None
    if not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs to be true", field="top_logprobs", value=body.top_logprobs
        )
    if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        raise _range("top_logprobs", body.top_logprobs, MAX_TOP_LOGPROBS)
    return body.top_logprobs


def _range(field: str, value: int, high: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is {value}; it must be an integer in [0, {high}]",
        field=field,
        value=value,
        allowed=f"an integer in [0, {high}]",
    )


def _check_stream_options(body: ChatCompletionBody | CompletionBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options is only allowed when stream is true", field="stream_options")


def _sampling(
    body: ChatCompletionBody | CompletionBody,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: bool,
) -> SamplingOptions:
    return SamplingOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=body.min_tokens,
        max_tokens=max_tokens,
        n=body.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        format=output_format(body),
    )


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not token.isdecimal() or len(token) > _ID_DIGITS:
            raise InvalidRequestError(
                f"logit_bias names {token!r}", field="logit_bias", value=token, allowed="token ids as keys"
            )
    return {int(token): value for token, value in bias.items()}


def _options(body: ChatCompletionBody | CompletionBody, request_id: str) -> RequestOptions:
    return RequestOptions(
        priority=body.priority or 0,
        prompt_cache_key=conversation_id(body.prompt_cache_key, body.metadata),
        bypass_cache=bool(body.bypass_cache),
        allow_sparse_prefill=bool(body.allow_sparse_prefill),
        request_id=request_id,
    )


def _prompts(prompt: str | list[Any]) -> list[Prompt]:
    """The four forms OpenAI allows: text, texts, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise InvalidRequestError("the prompt is empty", field="prompt", allowed="at least one token")
    if all(isinstance(item, str) for item in prompt):
        return [TextPrompt(item) for item in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [TokenPrompt(packed_ids(item, f"prompt[{place}]")) for place, item in enumerate(prompt)]
    return [TokenPrompt(packed_ids(prompt, "prompt"))]


def packed_ids(ids: list[Any], field: str) -> bytes:
    """Token ids packed little-endian uint32. Raises InvalidRequestError naming `field`."""
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise InvalidRequestError(
            f"{field} is no list of token ids", field=field, allowed="text, or a list of integers >= 0"
        )
    try:
        return pack_ids(array("I", ids))
    except OverflowError:
        raise InvalidRequestError(f"{field} has an id out of range", field=field, allowed="integers >= 0") from None
