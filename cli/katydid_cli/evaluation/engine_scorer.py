"""Scores through a running engine's own session: whatever its options, what is measured is what it serves."""

from __future__ import annotations

import array
import itertools
import queue
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1 import engine_pb2_grpc as pb_grpc

from katydid_cli.evaluation.scorer import Continuation, EvaluationError, Scores

__all__ = ["EngineScorer"]


class EngineScorer:
    """One engine by address; requests go one at a time and touch no cache. Use as a context manager.

    The service does not report acceptance by depth, so `drafts` is false.
    """

    drafts = False

    def __init__(self, address: str, *, timeout_s: float = 600.0) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._stub: Any = pb_grpc.EngineServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self.vocabulary = self.max_length = 0

    def __enter__(self) -> Self:
        try:
            about = self._stub.Describe(pb.DescribeRequest(), timeout=30)
        except grpc.RpcError as error:
            raise EvaluationError(f"the engine does not answer: {error}") from error
        # The engine keeps one position for its output.
        self.vocabulary, self.max_length = about.vocab_size, about.max_model_tokens - 1
        self._eos = frozenset(about.eos_token_ids)
        self._outgoing.put(pb.SessionRequest(open=pb.SessionOpen(client="katydid-eval")))
        self._frames: Iterator[pb.SessionResponse] = self._stub.Session(iter(self._outgoing.get, None))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._outgoing.put(None)
        self._channel.close()

    def score(self, ids: Sequence[int]) -> Scores:
        """Scores ids[1:] from the log probabilities of the prompt; raises EvaluationError with the engine's reason."""
        sampling = pb.SamplingParams(temperature=0, top_p=1, repetition_penalty=1, max_tokens=1, n=1, prompt_logprobs=1)
        logprobs, greedy = array.array("f"), []
        at = 1
        for frame, number in self._ask(ids, sampling):
            for row in frame.logprobs:
                if row.request == number and row.prompt:
                    chosen = array.array("f", row.chosen)
                    tops = array.array("I", row.top_tokens)[:: max(1, row.top)]
                    logprobs += chosen
                    greedy += [top == token for top, token in zip(tops, ids[at : at + len(chosen)], strict=True)]
                    at += len(chosen)
        if len(logprobs) != len(ids) - 1:
            raise EvaluationError(f"the engine scored {len(logprobs)} of {len(ids) - 1} prompt tokens")
        return Scores(list(logprobs), greedy)

    def score_many(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        """One after another."""
        return [self.score(ids) for ids in sequences]

    def generate(
        self, ids: Sequence[int], max_tokens: int, stop: Sequence[int] = (), draft_depth: int = 0
    ) -> Continuation:
        """Continues greedily; raises EvaluationError with the engine's reason, and for draft_depth > 0."""
        if draft_depth:
            raise EvaluationError("the engine service does not report acceptance by depth: use --in-process")
        sampling = pb.SamplingParams(
            temperature=0, top_p=1, repetition_penalty=1, max_tokens=max_tokens, n=1, stop_token_ids=list(stop)
        )
        tokens = array.array("I")
        for frame, number in self._ask(ids, sampling):
            columns = [array.array("I", c) for c in (frame.tokens.requests, frame.tokens.counts, frame.tokens.tokens)]
            offset = 0
            for request, count in zip(columns[0], columns[1], strict=True):
                if request == number:
                    tokens += columns[2][offset : offset + count]
                offset += count
        produced = list(tokens)
        if produced and (produced[-1] in stop or produced[-1] in self._eos):
            produced.pop()
        return Continuation(produced)

    def _ask(self, ids: Sequence[int], sampling: pb.SamplingParams) -> Iterator[tuple[pb.SessionResponse, int]]:
        """Every frame until the request ends, with the request's number."""
        number = next(self._numbers)
        submit = pb.SubmitRequest(
            request=number,
            request_id=f"eval-{number}",
            prompt_ids=array.array("I", ids).tobytes(),
            sampling=sampling,
            bypass_cache=True,
        )
        submit.timeout.FromMilliseconds(int(self._timeout_s * 1000))
        self._outgoing.put(pb.SessionRequest(submit=submit))
        try:
            for frame in self._frames:
                self._outgoing.put(pb.SessionRequest(ack=pb.FrameAck(frame=frame.frame)))
                yield frame, number
                for finish in frame.finishes:
                    if finish.request == number:
                        if finish.HasField("error"):
                            raise EvaluationError(f"the engine refused: {finish.error.message}")
                        return
        except grpc.RpcError as error:
            raise EvaluationError(f"the engine was lost: {error}") from error
        raise EvaluationError("the engine closed its session")
