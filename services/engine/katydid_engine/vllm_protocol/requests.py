"""From the protocol's GenerateRequest to our SubmitRequest: the same checks follow as for any gateway's.

Unset numbers are 0 in this protocol; where 0 says nothing (top_p, penalties, n) it means the default.
"""

from __future__ import annotations

import secrets
from array import array

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.block_hash import pack_ids
from katydid_runtime.errors import InvalidRequestError, UnsupportedError
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from katydid_engine.submission import EngineLimits

__all__ = ["submission"]

_MEDIA = ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")


def submission(request: vllm.GenerateRequest, limits: EngineLimits, dp_rank: int) -> pb.SubmitRequest:
    """The message for the face, yet without a number.

    Stop strings are left to the gateway, which has the text and aborts; so is what it does with special tokens.

    Raises:
        InvalidRequestError: the prompt is not given as token ids, or an id is negative.
        UnsupportedError: media, another engine's cache or prompt truncation is asked for.
    """
    for field in _MEDIA:
        if request.HasField(field):
            raise UnsupportedError(f"this engine takes no {field}", field=field)
    if request.WhichOneof("input") != "tokenized":
        raise InvalidRequestError("the prompt must come as token ids", field="input", allowed="tokenized")
    ids = request.tokenized.input_ids
    sampling = request.sampling_params
    if sampling.HasField("truncate_prompt_tokens"):
        raise UnsupportedError("this engine truncates no prompt", field="sampling_params.truncate_prompt_tokens")
    room = max(1, limits.max_model_tokens - len(ids))
    return pb.SubmitRequest(
        request_id=request.request_id,
        prompt_ids=pack_ids(array("I", ids)),
        dp_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else dp_rank,
        sampling=pb.SamplingParams(
            seed=sampling.seed % 2**64 if sampling.HasField("seed") else secrets.randbits(63),
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            top_p=sampling.top_p or 1.0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias={_token(token): bias for token, bias in sampling.logit_bias.items()},
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            max_tokens=min(sampling.max_tokens, room) if sampling.HasField("max_tokens") else room,
            n=sampling.n or 1,
            logprobs=_logprobs(sampling, "logprobs"),
            prompt_logprobs=_logprobs(sampling, "prompt_logprobs"),
            ignore_eos=sampling.ignore_eos,
            grammar=_grammar(sampling),
        ),
    )


def _token(token: int) -> int:
    if token < 0:
        raise InvalidRequestError("a token id is negative", field="sampling_params.logit_bias", value=token)
    return token


def _logprobs(sampling: vllm.SamplingParams, field: str) -> int | None:
    if not sampling.HasField(field):
        return None
    count: int = getattr(sampling, field)
    if count < 0:
        raise UnsupportedError(
            "this engine does not send the whole vocabulary", field=f"sampling_params.{field}", value=count
        )
    return count


def _grammar(sampling: vllm.SamplingParams) -> pb.Grammar | None:
    match sampling.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return pb.Grammar(json_schema=sampling.json_schema)
        case "json_object":
            return pb.Grammar(json_schema='{"type": "object"}') if sampling.json_object else None
        case "regex":
            return pb.Grammar(regex=sampling.regex)
        case "grammar":
            return pb.Grammar(ebnf=sampling.grammar)
        case "choice":
            return pb.Grammar(choice=pb.ChoiceGrammar(choices=sampling.choice.choices))
        case "structural_tag":
            return pb.Grammar(structural_tag=sampling.structural_tag)
        case kind:
            raise UnsupportedError(f"this engine has no {kind}", field=f"sampling_params.{kind}")
