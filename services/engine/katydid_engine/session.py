"""One gateway's session: numbered frames, kept until acknowledged, and a stream that may be lost and taken up again."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.errors import ConflictError

from katydid_engine.frames import FrameDraft

__all__ = ["Session"]

_UNACKNOWLEDGED_BYTES = 64 * 1024 * 1024


class Session:
    """``seal`` makes a numbered frame of a draft; it knows the loads. ``requests`` maps gateway's numbers to handles.

    A stream attaches, sends ``frames`` and detaches; a newer one takes over from an older one.
    """

    def __init__(self, client: str, seal: Callable[[FrameDraft, int], pb.SessionResponse]) -> None:
        self.id = uuid.uuid4().hex
        self.client = client
        self.requests: dict[int, int] = {}
        self.draft = FrameDraft()
        self.attached = False
        self._seal = seal
        self._frames: deque[pb.SessionResponse] = deque()
        self._kept_bytes = 0
        self._last_number = 0
        self._sent = 0
        self._wanted = False
        self._wake = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._stream = 0

    @property
    def overflown(self) -> bool:
        """Whether the gateway leaves more unacknowledged than may be kept."""
        return self._kept_bytes > _UNACKNOWLEDGED_BYTES

    def wake(self, *, even_empty: bool = False) -> None:
        """Lets the stream send the draft; with ``even_empty`` also when it carries loads alone."""
        self._wanted = self._wanted or even_empty
        self._caught_up.clear()
        self._wake.set()

    async def caught_up(self) -> None:
        """Returns once the stream has sent everything, or is gone."""
        if self.attached:
            await self._caught_up.wait()

    def acknowledge(self, number: int) -> None:
        """Forgets frames up to ``number``."""
        while self._frames and self._frames[0].frame <= number:
            self._kept_bytes -= self._frames.popleft().ByteSize()

    def attach(self, last_frame: int) -> int:
        """A stream begins, to which frames up to ``last_frame`` are known; returns its number.

        Raises:
            ConflictError: the frame after ``last_frame`` is no longer kept, or was never made.
        """
        first = self._frames[0].frame if self._frames else self._last_number + 1
        if not first - 1 <= last_frame <= self._last_number:
            raise ConflictError(
                f"frame {last_frame + 1} of the session is not there",
                field="open.last_frame",
                value=last_frame,
                allowed=f"{first - 1} to {self._last_number}",
            )
        self.acknowledge(last_frame)
        self.attached = True
        self._caught_up.clear()
        self._sent = last_frame
        self._stream += 1
        self._wake.set()
        return self._stream

    def is_present(self, stream: int) -> bool:
        """Whether no newer stream has taken over from ``stream``."""
        return stream == self._stream

    def detach(self, stream: int) -> bool:
        """A stream has ended; returns whether the session is left without one by that."""
        left_alone = self.attached and stream == self._stream
        if left_alone:
            self.attached = False
            self._caught_up.set()
            self._wake.set()
        return left_alone

    def close(self) -> None:
        """Ends the session for good; frames are no longer kept."""
        self.attached = False
        self._frames.clear()
        self._kept_bytes = 0
        self._caught_up.set()
        self._wake.set()

    async def frames(self, stream: int, opened: pb.SessionOpened) -> AsyncIterator[pb.SessionResponse]:
        """What the stream is to send, its first frame with ``opened``; ends when detached or taken over."""
        greeting: pb.SessionOpened | None = opened
        while self.attached and stream == self._stream:
            frame = self._next_frame(even_empty=greeting is not None)
            if frame is None:
                self._caught_up.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            if greeting is not None:
                kept, frame = frame, pb.SessionResponse(opened=greeting)
                frame.MergeFrom(kept)
                greeting = None
            yield frame

    def _next_frame(self, *, even_empty: bool) -> pb.SessionResponse | None:
        if self._sent == self._last_number:
            if self.draft.empty and not self._wanted and not even_empty:
                return None
            self._wanted = False
            self._last_number += 1
            frame = self._seal(self.draft, self._last_number)
            self.draft = FrameDraft()
            self._frames.append(frame)
            self._kept_bytes += frame.ByteSize()
        self._sent += 1
        return self._frames[self._sent - self._frames[0].frame]
