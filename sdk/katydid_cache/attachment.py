"""Keeps a client attached: one open Attach stream, opened again after the service's death with bounded back-off.

Whether the service can be called now is known here, without a call: a stream that broke means dead, a notice means
draining, and deadlines passed several times in a row mean that it hangs. In all three cases calls fail at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from typing import Any

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.errors import IdentityMismatchError, InvalidRequestError, KatydidError, UnavailableError
from katydid_runtime.rpc_errors import from_rpc_error

from katydid_cache.arena import ArenaMapping
from katydid_cache.layout import BlockLayout
from katydid_cache.local_calls import LocalCalls

__all__ = ["Attachment", "attach_request"]

_BACKOFF_S = (0.05, 2.0)
_AGAIN_POLL_S = 0.02
_TIMEOUTS_TO_SUSPECT = 3
_SUSPECT_S = (1.0, 8.0)

logger = logging.getLogger(__name__)


class Attachment:
    """The state of one client's attachment; `keep` runs as a task for as long as the client is open."""

    def __init__(self, stub: Any, request: pb.AttachRequest, address: str) -> None:
        self._stub = stub
        self._request = request
        self._address = address
        self._id = 0
        self._refusal: KatydidError | None = None
        self.failure: KatydidError | None = None
        """Why the last try to attach failed; None when it did not."""
        self._changed = asyncio.Event()
        self._timeouts = 0
        self._suspect_until = 0.0
        self.boot_epoch = 0
        self.frame_bytes = 0
        self.lane_port = 0
        self.peer_address = ""
        self.arena: ArenaMapping | None = None
        self.local: LocalCalls | None = None

    @property
    def usable(self) -> bool:
        """Whether a call has a chance now."""
        return self._id != 0 and time.monotonic() >= self._suspect_until

    def require(self) -> int:
        """The attachment id for a call. Raises UnavailableError at once when there is none, or the service hangs."""
        if self._refusal is not None:
            raise self._refusal
        if not self.usable:
            state = "does not answer" if self._id else "is not attached"
            raise UnavailableError(f"the cache service at {self._address} {state}")
        return self._id

    def succeeded(self) -> None:
        """A call was answered."""
        self._timeouts = 0

    def timed_out(self) -> None:
        """A call's deadline passed. Several in a row and the service is left alone for a while."""
        if time.monotonic() < self._suspect_until:
            return  # it was under way already, and tells nothing new
        self._timeouts += 1
        if self._timeouts >= _TIMEOUTS_TO_SUSPECT:
            pause = _SUSPECT_S[0] * 2 ** (self._timeouts - _TIMEOUTS_TO_SUSPECT)
            self._suspect_until = time.monotonic() + min(pause, _SUSPECT_S[1])

    async def first(self, timeout_s: float, hopeless: tuple[type[KatydidError], ...] = ()) -> bool:
        """Wait for the first answer to Attach; False when none came in time.

        Raises what the service refused with for good, and failures of the kinds that are `hopeless` to the caller.
        """
        deadline = time.monotonic() + timeout_s
        while not self._id and self._refusal is None:
            if isinstance(self.failure, hopeless):
                raise self.failure
            self._changed.clear()
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                    await self._changed.wait()
            except TimeoutError:
                return False
        if self._refusal is not None:
            raise self._refusal
        return True

    async def again(self, within_s: float) -> int:
        """The attachment to go on with after a stream broke: a new one, or the old if it stands; 0 when none comes."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            await asyncio.sleep(_AGAIN_POLL_S)
            if self.usable:
                return self._id
        return 0

    async def keep(self) -> None:
        """Attach, stay attached, and attach again, until cancelled or refused for good."""
        backoff = _BACKOFF_S[0]
        while True:
            call = self._stub.Attach(self._request)
            try:
                async for response in call:
                    await self._take(response)
                    backoff = _BACKOFF_S[0]
            except UnavailableError as error:
                self._failed(error)
            except OSError as error:  # out of descriptors, say
                self._failed(UnavailableError(f"the cache service's socket can't be used: {error}"))
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self._address)
                if isinstance(failure, IdentityMismatchError | InvalidRequestError):
                    self._refusal = failure
                    self._changed.set()
                    return
                self._failed(failure)
            finally:
                self._id = 0
                call.cancel()
                if self.local is not None:
                    self.local.close()
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _BACKOFF_S[1])

    def _failed(self, failure: KatydidError) -> None:
        """Note why there is no attachment, and say so where it is news."""
        if self._id or str(failure) != str(self.failure):
            what = "cache service lost" if self._id else "not attached"
            logger.warning("%s: %s", what, failure, extra={"address": self._address})
        self.failure = failure
        self._changed.set()

    def _drop_arena(self) -> None:
        if self.local is not None:
            self.local.close()
        if self.arena is not None:
            self.arena.dropped = True
        self.arena = self.local = None

    async def _take(self, response: pb.AttachResponse) -> None:
        if response.WhichOneof("message") == "attached":
            self._drop_arena()
            if response.attached.HasField("arena"):
                self.arena, connection = await ArenaMapping.receive(response.attached.arena)
                self.local = await LocalCalls.over(connection)
                threading.Thread(target=self.arena.prefault, name="arena-prefault", daemon=True).start()
            self._id = response.attached.attachment
            self.boot_epoch = response.attached.boot_epoch
            self.frame_bytes = response.attached.frame_bytes
            self.lane_port = response.attached.lane_port
            self.peer_address = response.attached.peer_address
            self._timeouts, self._suspect_until, self.failure = 0, 0.0, None
            self._changed.set()
        elif response.notice.draining:
            self._id = 0


def attach_request(client: str, identity: bytes, layout: BlockLayout, *, arena: bool) -> pb.AttachRequest:
    """What a client joins with."""
    return pb.AttachRequest(
        client=client,
        want_arena=arena,
        identity=identity,
        layout=pb.BlockLayout(
            version=layout.version,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_tokens=layout.block_tokens,
            dtype=layout.dtype,
            block_bytes=layout.block_bytes,
        ),
    )
