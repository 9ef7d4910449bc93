"""The face between gateways and workers, where no process is needed to see it: what becomes of a session's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid_engine.block_watch import BlockWatch
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.face import Face
from katydid_engine.grammar import Grammar, GrammarError, GrammarKind
from katydid_engine.grammar_rules import ruled
from katydid_engine.messages import Abort, Load, Submit, ToWorker
from katydid_engine.submission import EngineLimits
from katydid_runtime.errors import InvalidRequestError
from katydid_runtime.telemetry import Telemetry

from tests.engine.engine_process import submission


async def every_grammar(grammar: Grammar, _tenant: bytes) -> Grammar:
    return grammar


async def ruled_grammar(grammar: Grammar, _tenant: bytes) -> Grammar:
    try:
        return ruled(grammar)
    except GrammarError as error:
        raise InvalidRequestError(str(error), field="sampling.grammar", value=grammar.source) from error


def new_face(sent: list[ToWorker], check: Callable[[Grammar, bytes], Awaitable[Grammar]] = every_grammar) -> Face:
    return Face(
        EngineLimits(
            b"i" * 32,
            vocab_size=100,
            max_model_tokens=20,
            max_choices=4,
            max_logprobs=5,
            dp_ranks=1,
            grammar_kinds=(GrammarKind.JSON_SCHEMA,),
        ),
        send=lambda _rank, message: sent.append(message),
        ask_cache=lambda _rank, _ask, _spans: None,
        check_grammar=check,
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


def test_a_refused_schema_whose_names_no_message_can_hold_ends_its_request() -> None:
    """Half a surrogate pair, which JSON can name."""

    async def scenario() -> None:
        face = new_face([], ruled_grammar)
        session, stream, opened = face.open_session(pb.SessionOpen(client="test"))
        request = submission(1, [1, 2])
        request.sampling.grammar.json_schema = r'{"properties": {"\ud800": {"not": {}}}}'
        face.submit(session, request)
        frames = session.frames(stream, opened)
        async with asyncio.timeout(10):
            while not (ends := (await anext(frames)).finishes):
                pass
        assert [end.error.message for end in ends] == [r"#/properties/\ud800/not cannot be enforced"]
        assert face.num_requests == 0

    asyncio.run(scenario())
