"""Frames sorted by request: merged steps, log probabilities in order, stop tokens, and columns that do not fit."""

from __future__ import annotations

from array import array

import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid_gateway.engines.frames import sort_frame
from katydid_gateway.requests import FinishReason
from katydid_runtime.errors import PromptTooLongError


def pack(*values: int) -> bytes:
    return array("I", values).tobytes()


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def columns(
    requests: list[int], counts: list[int], tokens: list[int], choices: list[int] | None = None
) -> pb.TokenColumns:
    return pb.TokenColumns(
        requests=pack(*requests), counts=pack(*counts), tokens=pack(*tokens), choices=pack(*choices or [])
    )


def test_rows_go_to_their_requests_in_order() -> None:
    frame = pb.SessionResponse(tokens=columns([7, 8, 7], [2, 1, 1], [1, 2, 3, 4], [0, 1, 0]))
    steps = sort_frame(frame)
    assert [(row.choice, list(row.ids)) for row in steps[7].rows] == [(0, [1, 2]), (0, [4])]
    assert [(row.choice, list(row.ids)) for row in steps[8].rows] == [(1, [3])]


def test_log_probabilities_follow_the_rows_of_merged_steps() -> None:
    frame = pb.SessionResponse(tokens=columns([7, 7], [1, 2], [1, 2, 3]))
    for chosen in ([-1.0], [-2.0, -3.0]):
        top = len(chosen)
        frame.logprobs.add(
            request=7, chosen=floats(*chosen), top=1, top_tokens=pack(*[9] * top), top_logprobs=floats(*chosen)
        )
    for value in (-5.0, -6.0):
        frame.logprobs.add(request=7, chosen=floats(value), prompt=True)
    step = sort_frame(frame)[7]
    assert [list(row.logprobs.chosen) for row in step.rows if row.logprobs is not None] == [[-1.0], [-2.0, -3.0]]
    assert [list(part.chosen) for part in step.prompt_logprobs] == [[-5.0], [-6.0]]


def test_a_finish_marks_its_stop_token_and_carries_its_error() -> None:
    frame = pb.SessionResponse(tokens=columns([7, 8], [2, 1], [1, 2, 2]))
    frame.finishes.add(request=7, reason=pb.FINISH_REASON_STOP, stop_token=2)
    frame.finishes.add(request=8, reason=pb.FINISH_REASON_LENGTH)
    error = pb.RequestError(reason="PROMPT_TOO_LONG", message="too long", field="prompt_ids")
    frame.finishes.add(request=9, reason=pb.FINISH_REASON_ERROR, error=error)
    frame.first_tokens.add(request=7, cached=pb.CachedTokens(device=64, disk=128))
    steps = sort_frame(frame)
    assert (steps[7].rows[0].stop_token, steps[8].rows[0].stop_token) == (2, None)
    assert (steps[7].first, steps[7].cached.total, steps[7].cached.disk) == (True, 192, 128)
    assert [steps[number].finishes[0].reason for number in (7, 8)] == [FinishReason.STOP, FinishReason.LENGTH]
    failed = steps[9].finishes[0]
    assert isinstance(failed.error, PromptTooLongError)
    assert (failed.error.field, failed.retryable) == ("prompt_ids", False)


@pytest.mark.parametrize(
    "tokens",
    [
        columns([7], [2], [1]),
        columns([7, 8], [1], [1]),
        columns([7, 8], [1, 1], [1, 2], [0]),
        pb.TokenColumns(requests=b"123"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tokens: pb.TokenColumns) -> None:
    with pytest.raises(ValueError):
        sort_frame(pb.SessionResponse(tokens=tokens))


@pytest.mark.parametrize(
    "logprobs",
    [
        pb.TokenLogprobs(request=7, chosen=floats(-1.0)),
        pb.TokenLogprobs(request=9, chosen=floats(-1.0, -1.0)),
        pb.TokenLogprobs(request=7, chosen=floats(-1.0, -1.0), top=1, top_tokens=pack(1)),
    ],
)
def test_log_probabilities_that_do_not_fit_are_refused(logprobs: pb.TokenLogprobs) -> None:
    with pytest.raises(ValueError, match="log prob"):
        sort_frame(pb.SessionResponse(tokens=columns([7], [2], [1, 2]), logprobs=[logprobs]))
