"""What the face says of a request, in the protocol's words: a chunk a step and choice, and a last message a choice."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.errors import error_from_details
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from katydid_engine.vllm_protocol.steps import Step

__all__ = ["Answer"]

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_GRAMMAR: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


class Answer:
    """One request's answer; whole texts of tokens are kept only where the caller does not stream."""

    def __init__(self, message: pb.SubmitRequest, *, stream: bool) -> None:
        self._stream = stream
        self._prompt = list(struct.unpack(f"<{len(message.prompt_ids) // 4}I", message.prompt_ids))
        self._stop_tokens = frozenset(message.sampling.stop_token_ids)
        self._cached = 0
        self._counts: dict[int, int] = {}
        self._ids: dict[int, list[int]] = {}
        self._output: dict[int, vllm.OutputLogProbs] = {}
        self._input: vllm.InputLogProbs | None = None

    def responses(self, step: Step) -> Iterator[vllm.GenerateResponse]:
        """What goes out for one step. Raises the KatydidError that the request failed with."""
        if step.cached is not None:
            self._cached = _total(step.cached)
        logprobs = self._logprobs(step)
        for choice, ids in step.tokens.items():
            self._counts[choice] = self._counts.get(choice, 0) + len(ids)
            if self._stream:
                yield self._chunk(choice, ids, logprobs.get(choice))
            else:
                self._ids.setdefault(choice, []).extend(ids)
                if choice in logprobs:
                    self._output.setdefault(choice, vllm.OutputLogProbs()).MergeFrom(logprobs[choice])
        for finish in step.finishes:
            yield self._complete(finish)

    def _chunk(self, choice: int, ids: Sequence[int], logprobs: vllm.OutputLogProbs | None) -> vllm.GenerateResponse:
        first, self._input = self._input, None
        return vllm.GenerateResponse(
            chunk=vllm.GenerateStreamChunk(
                token_ids=ids,
                prompt_tokens=len(self._prompt),
                completion_tokens=self._counts[choice],
                cached_tokens=self._cached,
                output_logprobs=logprobs,
                input_logprobs=first,
                index=choice,
            )
        )

    def _complete(self, finish: pb.Finish) -> vllm.GenerateResponse:
        if finish.reason == pb.FINISH_REASON_ERROR:
            error = finish.error
            given = {"field": error.field, "value": error.value, "allowed": error.allowed}
            raise error_from_details(error.reason, error.message, {key: value for key, value in given.items() if value})
        complete = vllm.GenerateComplete(
            output_ids=self._ids.pop(finish.choice, []),
            finish_reason=_REASONS.get(finish.reason, "abort"),
            prompt_tokens=len(self._prompt),
            completion_tokens=self._counts.get(finish.choice, 0),
            cached_tokens=max(self._cached, _total(finish.cached)),
            output_logprobs=self._output.pop(finish.choice, None),
            input_logprobs=None if self._stream else self._input,
            index=finish.choice,
            spec_accepted_tokens=finish.accepted_tokens,
            spec_draft_tokens=finish.draft_tokens,
        )
        # Ends of sequence of the model's own are no stop that the caller named.
        if finish.HasField("stop_token") and finish.stop_token in self._stop_tokens:
            complete.matched_token_id = finish.stop_token
        return vllm.GenerateResponse(complete=complete)

    def _logprobs(self, step: Step) -> dict[int, vllm.OutputLogProbs]:
        """By choice, for this step's tokens; those of the prompt are kept for the first message."""
        found: dict[int, vllm.OutputLogProbs] = {}
        taken: dict[int, int] = {}
        for entry in step.logprobs:
            values, tops = _floats(entry.chosen), list(_tops(entry))
            if entry.prompt:
                if self._input is None:
                    # The prompt's first token has none; the others' come with the chunks of its prefill.
                    first = {"token_logprobs": [vllm.InputTokenLogProb()], "top_logprobs": [vllm.TopLogProbs()]}
                    self._input = vllm.InputLogProbs(token_ids=self._prompt, **first)
                self._input.token_logprobs.extend(vllm.InputTokenLogProb(value=value) for value in values)
                self._input.top_logprobs.extend(tops)
                continue
            start = taken.get(entry.choice, 0)
            taken[entry.choice] = start + len(values)
            own = found.setdefault(entry.choice, vllm.OutputLogProbs())
            own.token_logprobs.extend(values)
            own.token_ids.extend(step.tokens.get(entry.choice, [])[start : start + len(values)])
            own.top_logprobs.extend(tops)
        return found


def _tops(entry: pb.TokenLogprobs) -> Iterator[vllm.TopLogProbs]:
    ids = struct.unpack(f"<{len(entry.top_tokens) // 4}I", entry.top_tokens)
    values = _floats(entry.top_logprobs)
    for start in range(0, len(_floats(entry.chosen)) * entry.top, entry.top or 1):
        yield vllm.TopLogProbs(values=values[start : start + entry.top], token_ids=ids[start : start + entry.top])


def _floats(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def _total(cached: pb.CachedTokens) -> int:
    return cached.device + cached.memory + cached.disk + cached.shared
