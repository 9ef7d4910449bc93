"""Parts of frames that the mock engine sends."""

from __future__ import annotations

from array import array

from katydid.engine.v1 import engine_pb2 as pb


def ended(request: int, reason: pb.FinishReason) -> pb.SessionResponse:
    frame = pb.SessionResponse()
    frame.finishes.add(request=request, reason=reason)
    return frame


def logprob_columns(request: int, choice: int, ids: array, top: int, *, prompt: bool = False) -> pb.TokenLogprobs:
    """Token `t` has log probability -t / 1000; beside it stand ids 1, 2, ... with -1, -2, ..."""
    message = pb.TokenLogprobs(request=request, choice=choice, top=top, prompt=prompt)
    message.chosen = array("f", [-token / 1000 for token in ids]).tobytes()
    message.top_tokens = array("I", [place + 1 for _ in ids for place in range(top)]).tobytes()
    message.top_logprobs = array("f", [-(place + 1.0) for _ in ids for place in range(top)]).tobytes()
    return message
