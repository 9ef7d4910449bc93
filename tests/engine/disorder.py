"""Clients that submit, abort, leave and come back for a while, and whose every answer equals an undisturbed one."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
from katydid.engine.v1 import engine_pb2 as pb

from tests.engine.engine_process import Answer, SessionClient, session
from tests.engine.test_engine_process import prompt

__all__ = ["Disorder"]

JOBS = 100
LENGTHS = [1, 63, 64, 65, 128, 129, 200, 320, 500]


class Disorder:
    """Of a hundred fixed requests; ``pauses``: clients rest between their rounds, so that an engine is idle at times.

    Attributes:
        compared: answers that were.
    """

    def __init__(self, seed: int, *, pauses: bool = False) -> None:
        self._chooser = random.Random(seed)
        self._pauses = pauses
        self._expected: dict[int, dict[int, list[int]]] = {}
        self.compared = 0

    async def learn(self, address: str) -> None:
        """Each answer as an undisturbed engine gives it."""
        async with session(address) as client:
            for number in range(JOBS):
                ids, fields = _job(number)
                answer = await client.generate(ids, **fields)
                self._expected[number] = dict(answer.tokens)

    async def client(self, address: str, until: float, *, dp_ranks: int = 1) -> int:
        """Until a time of the monotonic clock; returns the number of answers that were compared."""
        before = self.compared
        async with grpc.aio.insecure_channel(address) as channel:
            while time.monotonic() < until:
                await self._round(SessionClient(channel), dp_ranks)
                if self._pauses and self._chooser.random() < 0.3:
                    await asyncio.sleep(self._chooser.uniform(0, 2))
        return self.compared - before

    async def _round(self, client: SessionClient, dp_ranks: int) -> None:
        chooser = self._chooser
        await client.open()
        pending: dict[int, Answer] = {}
        for _ in range(chooser.randint(1, 24)):
            number = chooser.randrange(JOBS)
            ids, fields = _job(number)
            pending[number] = client.submit(ids, **fields, dp_rank=chooser.randrange(dp_ranks))
            if chooser.random() < 0.2:
                client.send(abort=pb.AbortRequest(request=chooser.choice(list(client.answers))))
            await asyncio.sleep(chooser.uniform(0, 0.05))
        if chooser.random() < 0.3:
            await client.break_off()
            if chooser.random() < 0.5:
                return
            for answer in pending.values():
                if len(answer.ends) < answer.n:
                    answer.done.clear()
            await client.open(client.opened.session_id, client.frames[-1].frame)
            # What the engine does not run either ends in frames sent again, or was lost with the stream.
            await asyncio.sleep(1)
            running = [client.answers[request] for request in client.opened.running]
            pending = {n: a for n, a in pending.items() if a in running or len(a.ends) == a.n}
        for number, answer in pending.items():
            await asyncio.wait_for(answer.done.wait(), 120)
            for choice, end in answer.ends.items():
                assert end.reason != pb.FINISH_REASON_ERROR, end.error
                if end.reason != pb.FINISH_REASON_ABORT:
                    assert answer.tokens[choice] == self._expected[number][choice], (number, choice)
                    self.compared += 1
        await client.break_off()


def _job(number: int) -> tuple[list[int], dict[str, object]]:
    ids = prompt(LENGTHS[number % len(LENGTHS)], number % 5)
    fields: dict[str, object] = {"seed": number, "temperature": 1.0 * (number % 2), "max_tokens": 1 + number * 7 % 60}
    fields |= {"n": 1 + (number % 6 == 0), "priority": number % 3, "top_p": 0.9 if number % 4 == 1 else 1.0}
    return ids, fields
