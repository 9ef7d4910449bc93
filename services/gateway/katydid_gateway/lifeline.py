"""What ties one of several gateway processes to their parent: a pipe that says it lives, and breaks with either."""

from __future__ import annotations

import asyncio
import os
import signal

__all__ = ["BEAT", "BEAT_S", "READY", "Lifeline"]

BEAT_S = 1.0
BEAT, READY = b".", b"R"


class Lifeline:
    """The child's end, the write end of a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        os.set_blocking(pipe, False)

    async def run(self) -> None:
        """Tell that the process is ready, then that its loop turns. Without a parent the process ends as on SIGTERM."""
        self._write(READY)
        while True:
            await asyncio.sleep(BEAT_S)
            self._write(BEAT)

    def _write(self, sign: bytes) -> None:
        try:
            os.write(self._pipe, sign)
        except BlockingIOError:
            pass  # the parent has enough to read
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)
