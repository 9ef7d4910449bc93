"""Tries every grammar before its request is queued: in a process of its own, so that none can harm an engine.

The process reads and compiles one grammar at a time, of each tenant in turn, under limits of time and memory; one that
runs into a limit takes the process along, and the next check starts another. Verdicts are kept by the grammar's digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from katydid_runtime.errors import InvalidRequestError, KatydidError, UnavailableError

from katydid_engine.channel import BlockingChannel, ChannelClosed, FaceChannel
from katydid_engine.grammar import Grammar, GrammarError, GrammarKind
from katydid_engine.grammar_rules import ruled
from katydid_engine.turns import Turns

__all__ = ["GrammarChecks", "GrammarLimits"]

_VERDICTS = 4096
_CHARACTERS = 32 * 1024 * 1024
_START_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What a grammar is checked against.

    Attributes:
        folder: of the model; its tokenizer.json holds the vocabulary.
        vocab_size: of the logits.
        eos_token_ids: of the model.
        timeout_s: seconds a grammar may take to compile.
        memory_mib: memory that it may take meanwhile.
    """

    folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    timeout_s: float
    memory_mib: int


class _Verdict(NamedTuple):
    """What is wrong with a grammar, or nothing; and its source as it is compiled."""

    problem: str
    source: str = ""


class GrammarChecks:
    """The face's end. The process is started by the first check, or by `warm`."""

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._characters = 0
        self._turns = Turns()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: FaceChannel | None = None

    async def warm(self) -> None:
        """Starts the process, so that the first request with a grammar need not wait for it and its library."""
        started = time.monotonic()
        try:
            await self.check(Grammar(GrammarKind.REGEX, "a"))
        except KatydidError as error:
            logger.warning("the process that checks grammars is not ready: %s", error.message)
        else:
            logger.info("grammars can be checked", extra={"seconds": round(time.monotonic() - started, 1)})

    async def check(self, grammar: Grammar, tenant: bytes = b"") -> Grammar:
        """The grammar as it is compiled.

        Raises InvalidRequestError for one that is not enforced or does not compile within the limits, UnavailableError
        when the process does not start.
        """
        verdict = self._known(grammar)
        if verdict is None:
            # What is known already does not wait for others' grammars.
            async with self._turns.one(tenant):
                verdict = self._known(grammar)
                if verdict is None:
                    verdict = await self._try(grammar)
                    self._keep(grammar, verdict)
        if verdict.problem:
            raise InvalidRequestError(
                f"the grammar is refused: {verdict.problem}",
                field=f"sampling.grammar.{grammar.kind}",
                value=grammar.source,
                allowed=f"one that can be enforced token by token, and compiles in {self._limits.timeout_s:g} s and "
                f"{self._limits.memory_mib} MiB",
            )
        return replace(grammar, source=verdict.source)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _keep(self, grammar: Grammar, verdict: _Verdict) -> None:
        self._verdicts[grammar.digest] = verdict
        self._characters += len(verdict.source)
        while len(self._verdicts) > _VERDICTS or self._characters > _CHARACTERS:
            _, oldest = self._verdicts.popitem(last=False)
            self._characters -= len(oldest.source)

    def _known(self, grammar: Grammar) -> _Verdict | None:
        """The verdict of an earlier check."""
        verdict = self._verdicts.get(grammar.digest)
        if verdict is not None:
            self._verdicts.move_to_end(grammar.digest)
        return verdict

    async def _try(self, grammar: Grammar) -> _Verdict:
        channel = self._channel or await self._start()
        finished = False
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                channel.send(grammar)
                verdict = _Verdict(*await channel.receive())
                finished = True
                return verdict
        except TimeoutError:
            return _Verdict(f"it takes longer than {self._limits.timeout_s:g} s to compile")
        except ChannelClosed:
            return _Verdict(f"it takes more than {self._limits.memory_mib} MiB to compile")
        finally:
            # Cancelled in the middle, too: the next answer would be this one's.
            if not finished:
                self.close()

    async def _start(self) -> FaceChannel:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "katydid_engine.grammar_checks", str(theirs.fileno())]
        # Starting a process takes a millisecond.
        self._process = subprocess.Popen(  # noqa: ASYNC220
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._channel = channel = await FaceChannel.open(ours)
        channel.send(self._limits)
        started = False
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await channel.receive()
                started = True
        except (TimeoutError, ChannelClosed) as error:
            raise UnavailableError("the process that checks grammars does not start") from error
        finally:
            if not started:
                self.close()
        return channel


def _serve(channel: BlockingChannel) -> None:
    """The process's end: answers each grammar with a verdict. Ends when the face does."""
    (limits,) = channel.receive(_START_TIMEOUT_S)
    from katydid_engine.grammar_compiler import GrammarCompiler

    compiler = GrammarCompiler(Path(limits.folder), limits.vocab_size, limits.eos_token_ids)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + limits.memory_mib * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    channel.send("")
    while True:
        for grammar in channel.receive(_START_TIMEOUT_S):
            try:
                as_compiled = ruled(grammar)
                compiler.check(as_compiled)
            except GrammarError as error:
                if "bad_alloc" in str(error):
                    return  # as when the allocation ends the process: the face knows why
                channel.send((str(error)[:500],))
            except MemoryError:
                return
            else:
                channel.send(("", as_compiled.source))


if __name__ == "__main__":
    with contextlib.suppress(ChannelClosed, KeyboardInterrupt):
        _serve(BlockingChannel(int(sys.argv[1])))
