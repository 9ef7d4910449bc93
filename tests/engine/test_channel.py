"""Face and worker over their socket pair: whole messages, and news of the other's end."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from katydid_engine.channel import BlockingChannel, ChannelClosed, FaceChannel
from katydid_engine.messages import Abort, Alive, Reply


def test_messages_of_any_size_both_ways() -> None:
    ours, theirs = socket.socketpair()
    worker = BlockingChannel(theirs.detach())
    sent = [Abort(1), Reply(2, "x" * 3_000_000), Alive(), Reply(3, "")]

    def echo() -> None:
        received = 0
        while received < len(sent):
            for message in worker.receive(5.0):
                received += 1
                worker.send(message)

    async def scenario() -> None:
        channel = await FaceChannel.open(ours)
        for message in sent:
            channel.send(message)
        assert [await channel.receive() for _ in sent] == sent
        channel.close()

    thread = threading.Thread(target=echo)
    thread.start()
    asyncio.run(scenario())
    thread.join(5)
    with pytest.raises(ChannelClosed):
        worker.receive(5.0)
    with pytest.raises(ChannelClosed):
        worker.send(Alive())
    worker.close()


def test_waiting_for_nothing_ends() -> None:
    ours, theirs = socket.socketpair()
    worker = BlockingChannel(theirs.detach())
    with ours:
        assert worker.receive(0.01) == []
    worker.close()


def test_the_face_hears_of_the_workers_end_even_in_mid_message() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        channel = await FaceChannel.open(ours)
        theirs.sendall(b"\0\0\1\0half")
        theirs.close()
        with pytest.raises(ChannelClosed):
            await channel.receive()
        channel.send(Alive())
        channel.close()

    asyncio.run(scenario())
