"""Several answers as one stream: a completions request may carry several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from katydid_gateway.answer import Answer
from katydid_gateway.requests import Delta

__all__ = ["merged"]


async def merged(answers: Sequence[Answer], idle_s: float | None = None) -> AsyncIterator[tuple[int, list[Delta]]]:
    """(place of the answer, new output) as it comes, (0, []) when nothing came for `idle_s`.

    Raises the first failure; the other answers are the caller's to close.
    """
    if len(answers) == 1:
        async for batch in answers[0].batches(idle_s):
            yield 0, batch
        return
    queue: asyncio.Queue[tuple[int, list[Delta]] | BaseException | None] = asyncio.Queue(maxsize=len(answers))

    async def pump(place: int, answer: Answer) -> None:
        try:
            async for batch in answer.batches():
                await queue.put((place, batch))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(place, answer)) for place, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            try:
                async with asyncio.timeout(idle_s):
                    item = await queue.get()
            except TimeoutError:
                yield 0, []
                continue
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
