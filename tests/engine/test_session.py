"""A session's frames: numbered without a gap over any number of streams, forgotten once acknowledged."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid.engine.v1 import engine_pb2 as pb
from katydid_engine.frames import FrameDraft
from katydid_engine.messages import ChoiceTokens
from katydid_engine.session import Session
from katydid_runtime.errors import ConflictError


def new_session() -> Session:
    return Session("test", lambda draft, number: draft.seal(number, [], draining=False, role=pb.ROLE_BOTH))


def produce(session: Session, token: int) -> None:
    session.draft.add_tokens(1, ChoiceTokens(1, 0, array("I", (token,))))
    session.wake()


def tokens(frame: pb.SessionResponse) -> list[int]:
    return list(array("I", frame.tokens.tokens))


async def read(frames: AsyncIterator[pb.SessionResponse]) -> pb.SessionResponse:
    return await asyncio.wait_for(anext(frames), 5)


OPENED = pb.SessionOpened(session_id="s")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans()), max_size=12))
def test_nothing_is_lost_or_doubled(script: list[tuple[int, int, bool, bool]]) -> None:
    """Each item: produce so many tokens, read so many frames, acknowledge, then lose the stream."""

    async def scenario() -> None:
        session = new_session()
        stream = session.attach(0)
        frames = session.frames(stream, OPENED)
        arrived: list[pb.SessionResponse] = []
        made = 0
        for produced, wanted, acknowledge, lose in script:
            for _ in range(produced):
                produce(session, made)
                made += 1
            for _ in range(wanted if made > sum(len(tokens(frame)) for frame in arrived) else 0):
                if sum(len(tokens(frame)) for frame in arrived) == made:
                    break
                arrived.append(await read(frames))
            if acknowledge and arrived:
                session.acknowledge(arrived[-1].frame)
            if lose:
                assert session.detach(stream)
                stream = session.attach(arrived[-1].frame if arrived else 0)
                frames = session.frames(stream, OPENED)
                arrived.append(await read(frames))
                assert arrived[-1].opened == OPENED
        while sum(len(tokens(frame)) for frame in arrived) < made:
            arrived.append(await read(frames))
        assert [frame.frame for frame in arrived] == list(range(1, len(arrived) + 1))
        assert [token for frame in arrived for token in tokens(frame)] == list(range(made))

    asyncio.run(scenario())


def test_steps_merge_while_the_stream_is_behind() -> None:
    async def scenario() -> None:
        session = new_session()
        for token in range(3):
            produce(session, token)
        frame = await read(session.frames(session.attach(0), OPENED))
        assert (frame.frame, tokens(frame)) == (1, [0, 1, 2])
        assert list(array("I", frame.tokens.counts)) == [1, 1, 1]
        assert frame.tokens.choices == b""

    asyncio.run(scenario())


def test_a_newer_stream_takes_over() -> None:
    async def scenario() -> None:
        session = new_session()
        old = session.attach(0)
        frames = session.frames(old, OPENED)
        await read(frames)
        waiting = asyncio.ensure_future(anext(frames, None))
        await asyncio.sleep(0)
        new = session.attach(1)
        assert await asyncio.wait_for(waiting, 5) is None
        assert not session.detach(old)
        assert session.attached
        assert session.detach(new)
        assert not session.attached

    asyncio.run(scenario())


def test_loads_alone_are_sent_when_asked() -> None:
    async def scenario() -> None:
        session = new_session()
        frames = session.frames(session.attach(0), OPENED)
        await read(frames)
        waiting = asyncio.ensure_future(anext(frames))
        session.wake()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        session.wake(even_empty=True)
        assert (await asyncio.wait_for(waiting, 5)).frame == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("last_frame", [0, 1, 4])
def test_frames_that_are_gone_or_never_were_are_refused(last_frame: int) -> None:
    async def scenario() -> None:
        session = new_session()
        stream = session.attach(0)
        frames = session.frames(stream, OPENED)
        for token in range(3):
            produce(session, token)
            await read(frames)
        session.acknowledge(2)
        session.detach(stream)
        with pytest.raises(ConflictError) as caught:
            session.attach(last_frame)
        assert caught.value.allowed == "2 to 3"

    asyncio.run(scenario())


def test_a_gateway_that_acknowledges_nothing_overflows() -> None:
    async def scenario() -> None:
        session = new_session()
        frames = session.frames(session.attach(0), OPENED)
        await read(frames)
        draft = session.draft
        draft.add_tokens(1, ChoiceTokens(1, 0, array("I", bytes(65 * 1024 * 1024))))
        session.wake()
        await read(frames)
        assert session.overflown
        session.close()
        assert not session.overflown
        assert await anext(frames, None) is None

    asyncio.run(scenario())


def test_an_empty_draft_says_so() -> None:
    draft = FrameDraft()
    assert draft.empty
    draft.add_unknown(3)
    assert not draft.empty
    assert list(draft.seal(1, [], draining=True, role=pb.ROLE_BOTH).unknown_requests) == [3]
