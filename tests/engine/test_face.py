"""The face between gateways and workers, where no process is needed to see it: what becomes of a session's requests."""

from __future__ import annotations

import asyncio

import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid_engine.block_watch import BlockWatch
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.face import Face
from katydid_engine.grammar import Grammar
from katydid_engine.messages import Abort, Load, Submit, ToWorker
from katydid_engine.submission import EngineLimits
from katydid_runtime.telemetry import Telemetry

from tests.engine.engine_process import submission


async def every_grammar(grammar: Grammar, _tenant: bytes) -> Grammar:
    return grammar


def new_face(sent: list[ToWorker]) -> Face:
    return Face(
        EngineLimits(b"i" * 32, vocab_size=100, max_model_tokens=20, max_choices=4, max_logprobs=5, dp_ranks=1),
        send=lambda _rank, message: sent.append(message),
        ask_cache=lambda _rank, _ask, _spans: None,
        check_grammar=every_grammar,
        blocks=BlockWatch("boot", 1),
        metrics=EngineMetrics(),
        telemetry=Telemetry("engine"),
        loads=[Load()],
        role=pb.ROLE_BOTH,
        boot_id="boot",
        reattach_window_s=600.0,
        max_requests=8,
    )


def test_a_request_that_comes_on_a_session_that_was_given_up_is_not_begun() -> None:
    """The old stream's last messages may be read after the new one has been opened: who would stop what they begin?"""

    async def scenario() -> None:
        sent: list[ToWorker] = []
        face = new_face(sent)
        old, _, opened = face.open_session(pb.SessionOpen(client="test"))
        face.submit(old, submission(1, [1, 2]))
        face.open_session(pb.SessionOpen(client="test", abandoned=opened.session_id))
        face.submit(old, submission(2, [1, 2]))
        assert [type(message) for message in sent] == [Submit, Abort]
        assert face.num_requests == 1, "which its worker has not ended yet"

    asyncio.run(scenario())


def test_a_session_that_another_gateway_has_given_up_is_none_of_ours() -> None:
    async def scenario() -> None:
        sent: list[ToWorker] = []
        face = new_face(sent)
        kept, _, _ = face.open_session(pb.SessionOpen(client="one"))
        face.open_session(pb.SessionOpen(client="two", abandoned="unknown"))
        face.open_session(pb.SessionOpen(client="three"))
        face.submit(kept, submission(1, [1, 2]))
        assert [type(message) for message in sent] == [Submit]

    asyncio.run(scenario())


def test_a_defect_that_one_request_meets_is_that_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        sent: list[ToWorker] = []
        face = new_face(sent)
        session, stream, opened = face.open_session(pb.SessionOpen(client="test"))
        with monkeypatch.context() as broken:
            broken.setattr("katydid_engine.face.parse_submission", lambda *_: {}[[]])  # type: ignore[index]
            face.submit(session, submission(1, [1, 2], n=2))
        face.submit(session, submission(2, [1, 2]))
        assert [type(message) for message in sent] == [Submit]
        frame = await anext(session.frames(stream, opened))
        assert [(end.request, end.choice, end.error.reason) for end in frame.finishes] == [
            (1, 0, "INTERNAL"),
            (1, 1, "INTERNAL"),
        ]

    asyncio.run(scenario())
