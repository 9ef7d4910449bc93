"""Messages of katydid.gateway.v1 to and from the gateway's own requests; no rules, only translation."""

from __future__ import annotations

from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import InvalidRequestError

from katydid_gateway.json_text import read_json
from katydid_gateway.requests import (
    Conversation,
    Delta,
    FinishedRequest,
    FinishReason,
    Message,
    OutputFormat,
    Prompt,
    RequestOptions,
    Role,
    SamplingOptions,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    Tool,
    ToolCall,
)
from katydid_gateway.routing.router import Decision, RoutedPrompt
from katydid_gateway.validation import check_template_options

__all__ = [
    "chat_event",
    "conversation_from",
    "explanation",
    "generate_event",
    "logprob_message",
    "options_from",
    "prompt_from",
    "sampling_from",
    "usage_and_timing",
]

_ROLES = {
    pb.CHAT_ROLE_SYSTEM: Role.SYSTEM,
    pb.CHAT_ROLE_USER: Role.USER,
    pb.CHAT_ROLE_ASSISTANT: Role.ASSISTANT,
    pb.CHAT_ROLE_TOOL: Role.TOOL,
}
_FINISHES = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: pb.FINISH_REASON_TOOL_CALLS,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


def prompt_from(message: pb.Prompt) -> Prompt:
    """Raises InvalidRequestError when neither text nor ids are set."""
    if message.WhichOneof("kind") == "token_ids":
        return TokenPrompt(message.token_ids)
    if message.WhichOneof("kind") == "text":
        return TextPrompt(message.text)
    raise InvalidRequestError("the prompt is empty", field="prompt", allowed="text or token_ids")


def conversation_from(message: pb.ChatRequest | pb.TokenizeRequest | pb.ExplainRouteRequest) -> Conversation:
    """Raises InvalidRequestError for an unset role or a schema that is no JSON object."""
    chat = message if isinstance(message, pb.ChatRequest) else None
    tools = () if isinstance(message, pb.ExplainRouteRequest) else message.tools
    return Conversation(
        messages=tuple(_message(place, item) for place, item in enumerate(message.messages)),
        tools=tuple(_tool(place, tool) for place, tool in enumerate(tools)),
        tool_choice=(chat.tool_choice if chat is not None else "") or "auto",
        parallel_tool_calls=chat is None or not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls,
        reasoning_effort=(chat.reasoning_effort if chat is not None else "") or None,
        template_options=_template_options(chat.template_options) if chat is not None else {},
    )


def sampling_from(message: pb.SamplingOptions) -> SamplingOptions:
    def given(name: str) -> object:
        return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]

    return SamplingOptions(
        **{name: given(name) for name in _OPTIONAL},  # type: ignore[arg-type]
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        prompt_logprobs=message.prompt_logprobs and message.HasField("logprobs"),
        format=_format(message.response_format) if message.HasField("response_format") else None,
    )


_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "max_tokens",
    "n",
    "logprobs",
)


def options_from(message: pb.RequestOptions, request_id: str) -> RequestOptions:
    return RequestOptions(
        priority=message.priority,
        prompt_cache_key=message.prompt_cache_key,
        bypass_cache=message.bypass_cache,
        allow_sparse_prefill=message.allow_sparse_prefill,
        request_id=message.request_id or request_id,
    )


def generate_event(request_id: str, delta: Delta) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.ids,
        logprobs=[logprob_message(entry) for entry in delta.logprobs],
        finish_reason=_FINISHES[delta.finish] if delta.finish is not None else pb.FINISH_REASON_UNSPECIFIED,
    )


def chat_event(request_id: str, delta: Delta) -> pb.ChatResponse:
    return pb.ChatResponse(
        request_id=request_id,
        index=delta.index,
        content=delta.text,
        reasoning_content=delta.reasoning,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments, index=call.index)
            for call in delta.tool_calls
        ],
        token_ids=delta.ids,
        logprobs=[logprob_message(entry) for entry in delta.logprobs],
        finish_reason=_FINISHES[delta.finish] if delta.finish is not None else pb.FINISH_REASON_UNSPECIFIED,
    )


def usage_and_timing(result: FinishedRequest) -> tuple[pb.Usage, pb.Timing]:
    usage, timing = result.usage, result.timing
    cached = usage.cached
    tiers = pb.CachedTokens(device=cached.device, memory=cached.memory, disk=cached.disk, shared=cached.shared)
    account = pb.Timing(engine=timing.engine, trace_id=timing.trace_id)
    account.ttft.CopyFrom(to_duration(timing.ttft_s))
    account.tpot.CopyFrom(to_duration(timing.tpot_s))
    for name, seconds in timing.phases_s.items():
        account.phases[name].CopyFrom(to_duration(seconds))
    return (
        pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=cached.total,
            cached_by_tier=tiers,
            reasoning_tokens=usage.reasoning_tokens,
        ),
        account,
    )


def explanation(prompt: RoutedPrompt, decision: Decision) -> pb.ExplainRouteResponse:
    candidates = []
    for candidate in decision.candidates:
        prediction = candidate.prediction
        candidates.append(
            pb.RouteCandidate(
                engine=candidate.holder.engine,
                dp_rank=candidate.holder.rank,
                predicted_ttft=to_duration(prediction.ttft_s),
                queue=to_duration(prediction.queue_s),
                fetch=to_duration(prediction.fetch_s),
                prefill=to_duration(prediction.prefill_s),
                device_blocks=prediction.device_blocks,
                cached_blocks=prediction.cached_blocks,
                home=candidate.home == 0 and not candidate.excluded,
                excluded=candidate.excluded,
                pressure=to_duration(prediction.pressure_s),
                partner=candidate.partner.engine if candidate.partner is not None else "",
                hand_off=to_duration(candidate.hand_off_s),
            )
        )
    return pb.ExplainRouteResponse(
        candidates=candidates, prompt_tokens=prompt.tokens, blocks=len(prompt.chain), reason=decision.reason
    )


def _message(place: int, message: pb.ChatMessage) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(
            f"messages[{place}] has no known role",
            field=f"messages[{place}].role",
            value=message.role,
            allowed="system, user, assistant or tool",
        )
    return Message(
        role=role,
        content=message.content if message.content or not message.tool_calls else None,
        reasoning=message.reasoning_content or None,
        tool_calls=tuple(
            ToolCall(number, call.id, call.name, call.arguments) for number, call in enumerate(message.tool_calls)
        ),
        tool_call_id=message.tool_call_id or None,
        name=message.name or None,
    )


def _tool(place: int, tool: pb.Tool) -> Tool:
    parameters = _json_object(tool.parameters, f"tools[{place}].parameters") if tool.parameters else None
    return Tool(tool.name, tool.description or None, parameters)


def _format(message: pb.ResponseFormat) -> OutputFormat | None:
    match message.WhichOneof("kind"):
        case "json_schema":
            return OutputFormat("json_schema", message.json_schema)
        case "json_object":
            return OutputFormat("json_schema", '{"type": "object"}') if message.json_object else None
        case "regex":
            return OutputFormat("regex", message.regex)
        case "grammar":
            return OutputFormat("ebnf", message.grammar)
        case "choice":
            return OutputFormat("choice", choices=tuple(message.choice.choices))
        case "structural_tag":
            return OutputFormat("structural_tag", message.structural_tag)
    return None


def _template_options(text: str) -> dict[str, object]:
    options = _json_object(text, "template_options") if text else {}
    check_template_options(options, "template_options")
    return options


def _json_object(text: str, field: str) -> dict[str, object]:
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is no JSON: {error}", field=field, value=text) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{field} is no JSON object", field=field, value=text)
    return value


def logprob_message(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        text=entry.text,
        bytes=entry.raw,
        logprob=entry.logprob,
        top=[logprob_message(other) for other in entry.top],
    )
