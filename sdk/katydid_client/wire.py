"""Translation between the client's values and `katydid.gateway.v1` messages.

Mistakes that the types cannot express (an unknown keyword, a role nobody has, two output formats at once) raise
InvalidRequestError naming the field before anything is sent; value ranges are the gateway's to judge.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_runtime.block_hash import pack_ids, unpack_ids
from katydid_runtime.duration import to_seconds
from katydid_runtime.errors import InvalidRequestError

from katydid_client.types import (
    CachedTokens,
    ChatArguments,
    Event,
    FinishReason,
    Message,
    MessageLike,
    Model,
    RequestArguments,
    RouteCandidate,
    RouteExplanation,
    Timing,
    TokenLogprob,
    Tokens,
    Tool,
    ToolCall,
    ToolLike,
    Usage,
)

_ROLES = {
    "system": pb.CHAT_ROLE_SYSTEM,
    "developer": pb.CHAT_ROLE_SYSTEM,
    "user": pb.CHAT_ROLE_USER,
    "assistant": pb.CHAT_ROLE_ASSISTANT,
    "tool": pb.CHAT_ROLE_TOOL,
}
_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_OPTIONS = ("priority", "prompt_cache_key", "bypass_cache", "allow_sparse_prefill", "request_id")
_CHAT = ("model", "tool_choice", "reasoning_effort", "parallel_tool_calls")
_FORMATS = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")

# By the type of a field, repeated or not.
_ALLOWED = {
    FieldDescriptor.CPPTYPE_UINT32: "integers of 0 to 4294967295",
    FieldDescriptor.CPPTYPE_UINT64: "integers of 0 to 18446744073709551615",
    FieldDescriptor.CPPTYPE_INT32: "integers of -2147483648 to 2147483647",
    FieldDescriptor.CPPTYPE_FLOAT: "numbers",
    FieldDescriptor.CPPTYPE_DOUBLE: "numbers",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "text",
}

T = TypeVar("T")
M = TypeVar("M", pb.SamplingOptions, pb.RequestOptions, pb.ChatRequest, pb.GenerateRequest)


def prompt(value: str | Sequence[int]) -> pb.Prompt:
    return pb.Prompt(text=value) if isinstance(value, str) else pb.Prompt(token_ids=pack(value))


def chat_messages(values: Iterable[MessageLike]) -> list[pb.ChatMessage]:
    return [_message(value, f"messages[{i}]") for i, value in enumerate(_each(values, "messages"))]


def chat_tools(values: Iterable[ToolLike]) -> list[pb.Tool]:
    return [_tool(value, f"tools[{i}]") for i, value in enumerate(_each(values, "tools"))]


def chat_request(messages: Iterable[MessageLike], arguments: ChatArguments) -> pb.ChatRequest:
    _refuse_unknown(arguments, ChatArguments)
    request = pb.ChatRequest(
        messages=chat_messages(messages),
        tools=chat_tools(arguments.get("tools") or ()),
        template_options=json.dumps(arguments["template_options"]) if "template_options" in arguments else "",
        sampling=_sampling(arguments),
        options=request_options(arguments),
    )
    return _fill(request, {name: value for name, value in arguments.items() if name in _CHAT})


def generate_request(text_or_ids: str | Sequence[int], arguments: RequestArguments) -> pb.GenerateRequest:
    _refuse_unknown(arguments, RequestArguments)
    request = pb.GenerateRequest(
        prompt=prompt(text_or_ids), sampling=_sampling(arguments), options=request_options(arguments)
    )
    return _fill(request, {"model": arguments.get("model")})


def request_options(arguments: RequestArguments) -> pb.RequestOptions:
    return _fill(pb.RequestOptions(), {name: value for name, value in arguments.items() if name in _OPTIONS})


def event(response: pb.GenerateResponse | pb.ChatResponse) -> Event:
    calls: Iterable[pb.ToolCall] = ()
    if isinstance(response, pb.ChatResponse):
        text, reasoning, calls = response.content, response.reasoning_content, response.tool_calls
        echoed: Iterable[pb.TokenLogprob] = ()
    else:
        text, reasoning, echoed = response.text, "", response.prompt_logprobs
    return Event(
        index=response.index,
        text=text,
        reasoning=reasoning,
        tool_calls=tuple(ToolCall(call.name, call.arguments, call.id, call.index) for call in calls),
        token_ids=tuple(unpack_ids(response.token_ids)),
        logprobs=tuple(map(_logprob, response.logprobs)),
        finish_reason=_FINISH_REASONS.get(response.finish_reason),
        request_id=response.request_id,
        usage=_usage(response.usage) if response.HasField("usage") else None,
        timing=_timing(response.timing) if response.HasField("timing") else None,
        prompt_logprobs=tuple(map(_logprob, echoed)),
    )


def tokens(response: pb.TokenizeResponse) -> Tokens:
    return Tokens(tuple(unpack_ids(response.token_ids)), response.prompt)


def models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(Model(model.id, model.max_model_tokens, model.engines) for model in response.models)


def route(response: pb.ExplainRouteResponse) -> RouteExplanation:
    candidates = tuple(
        RouteCandidate(
            engine=candidate.engine,
            dp_rank=candidate.dp_rank,
            predicted_ttft_s=to_seconds(candidate.predicted_ttft),
            queue_s=to_seconds(candidate.queue),
            fetch_s=to_seconds(candidate.fetch),
            prefill_s=to_seconds(candidate.prefill),
            device_blocks=candidate.device_blocks,
            cached_blocks=candidate.cached_blocks,
            home=candidate.home,
            excluded=candidate.excluded,
            pressure_s=to_seconds(candidate.pressure),
            partner=candidate.partner,
            hand_off_s=to_seconds(candidate.hand_off),
        )
        for candidate in response.candidates
    )
    return RouteExplanation(candidates, response.prompt_tokens, response.blocks, response.reason)


def pack(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32."""
    try:
        return pack_ids(array("I", ids))
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(
            f"token ids: {error}", field="prompt", allowed="integers of 0 to 4294967295"
        ) from None


def _fill(message: M, values: Mapping[str, Any]) -> M:
    """Set fields by name. protobuf's own errors name neither field nor value, so each field is set alone."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (TypeError, ValueError) as error:
            allowed = _ALLOWED.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
            raise InvalidRequestError(f"{name}: {error}", field=name, value=value, allowed=allowed) from None
    return message


def _refuse_unknown(arguments: Mapping[str, Any], known: type) -> None:
    names = known.__annotations__
    for name in arguments:
        if name not in names:
            raise InvalidRequestError(f"unknown argument {name}", field=name, allowed=", ".join(sorted(names)))


def _sampling(arguments: RequestArguments) -> pb.SamplingOptions:
    names = pb.SamplingOptions.DESCRIPTOR.fields_by_name
    given = {name: value for name, value in arguments.items() if name in names}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return _fill(pb.SamplingOptions(), given | _response_format(arguments))


def _response_format(arguments: RequestArguments) -> dict[str, pb.ResponseFormat]:
    given: dict[str, Any] = {name: value for name, value in arguments.items() if name in _FORMATS and value}
    if not given:
        return {}
    if len(given) > 1:
        names = " and ".join(given)
        raise InvalidRequestError(f"{names} exclude each other", field=next(iter(given)), allowed="one output format")
    ((kind, value),) = given.items()
    if kind in ("json_schema", "structural_tag") and not isinstance(value, str):
        value = json.dumps(value)
    elif kind == "choice":
        value = pb.ChoiceFormat(choices=value)
    return {"response_format": pb.ResponseFormat(**{kind: value})}


def _message(value: MessageLike, field: str) -> pb.ChatMessage:
    message = value if isinstance(value, Message) else _message_from_mapping(_mapping(value, field), field)
    if message.role not in _ROLES:
        raise InvalidRequestError(
            f"{field}.role is {message.role!r}", field=f"{field}.role", value=message.role, allowed=", ".join(_ROLES)
        )
    return pb.ChatMessage(
        role=_ROLES[message.role],
        content=message.content,
        reasoning_content=message.reasoning,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments, index=index)
            for index, call in enumerate(message.tool_calls)
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _each(values: Iterable[T], field: str) -> Iterable[T]:
    if not isinstance(values, Iterable):
        raise InvalidRequestError(f"{field} is no list", field=field, value=values, allowed="a list of mappings")
    return values


def _mapping(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{field} is no mapping", field=field, value=value, allowed="a mapping")
    return value


def _message_from_mapping(value: Mapping[str, Any], field: str) -> Message:
    content = value.get("content")
    if not (content is None or isinstance(content, str)):
        raise InvalidRequestError(f"{field}.content is no string", field=f"{field}.content", allowed="a string")
    calls = [_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(value.get("tool_calls") or ())]
    return Message(
        role=str(value.get("role", "")),
        content=content or "",
        reasoning=value.get("reasoning_content") or "",
        tool_calls=tuple(calls),
        tool_call_id=value.get("tool_call_id") or "",
        name=value.get("name") or "",
    )


def _call(value: Any, field: str) -> ToolCall:
    given = _mapping(value, field)
    given = {**given, **_mapping(given.get("function", {}), f"{field}.function")}
    return ToolCall(given.get("name", ""), given.get("arguments", ""), given.get("id", ""))


def _tool(value: ToolLike, field: str) -> pb.Tool:
    if not isinstance(value, Tool):
        given = _mapping(value, field)
        function = _mapping(given.get("function", given), f"{field}.function")
        value = Tool(function.get("name", ""), function.get("description", ""), function.get("parameters", {}))
    if not value.name:
        raise InvalidRequestError(f"{field} has no name", field=f"{field}.name", allowed="a function's name")
    # A tool without parameters is shown to the model without them.
    parameters = json.dumps(dict(value.parameters)) if value.parameters else ""
    return pb.Tool(name=value.name, description=value.description, parameters=parameters)


def _logprob(entry: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.text, entry.bytes, entry.logprob, tuple(map(_logprob, entry.top)))


def _usage(usage: pb.Usage) -> Usage:
    tier = usage.cached_by_tier
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cached_by_tier=CachedTokens(tier.device, tier.memory, tier.disk, tier.shared),
    )


def _timing(timing: pb.Timing) -> Timing:
    phases = {name: to_seconds(duration) for name, duration in timing.phases.items()}
    return Timing(to_seconds(timing.ttft), to_seconds(timing.tpot), phases, timing.engine, timing.trace_id)
