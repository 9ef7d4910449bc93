"""Parts of frames that the mock engine sends."""

from __future__ import annotations

from array import array

from katydid.engine.v1 import engine_pb2 as pb


def ended(request: int, reason: pb.FinishReason) -> pb.SessionResponse:
    frame = pb.SessionResponse()
    frame.finishes.add(request=request, reason=reason)
    return frame


def lost(request: int, choice: int) -> pb.SessionResponse:
    """The end of a choice whose worker has died."""
    frame = ended(request, pb.FINISH_REASON_ERROR)
    frame.finishes[0].choice = choice
    frame.finishes[0].error.CopyFrom(pb.RequestError(reason="ENGINE_LOST", message="a rank ended"))
    return frame


def prompt_logprobs(request: int, prompt: array, part: int) -> list[pb.TokenLogprobs]:
    """Of the prompt's tokens from the second on, so many together."""
    told = prompt[1:]
    return [
        logprob_columns(request, 0, told[start : start + part], 0, prompt=True) for start in range(0, len(told), part)
    ]


def logprob_columns(request: int, choice: int, ids: array, top: int, *, prompt: bool = False) -> pb.TokenLogprobs:
    """Token `t` has log probability -t / 1000; beside it stand ids 1, 2, ... with -1, -2, ..."""
    message = pb.TokenLogprobs(request=request, choice=choice, top=top, prompt=prompt)
    message.chosen = array("f", [-token / 1000 for token in ids]).tobytes()
    message.top_tokens = array("I", [place + 1 for _ in ids for place in range(top)]).tobytes()
    message.top_logprobs = array("f", [-(place + 1.0) for _ in ids for place in range(top)]).tobytes()
    return message
