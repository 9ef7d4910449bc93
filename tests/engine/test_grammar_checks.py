"""Grammars are tried in a process of their own: what breaks it is refused, and the next check finds another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path

import pytest
from katydid_engine.grammar import Grammar, GrammarKind
from katydid_engine.grammar_checks import GrammarChecks, GrammarLimits
from katydid_runtime.errors import InvalidRequestError

from tests.tiny_model import EOS_ID, VOCAB_SIZE, write_tiny_model

pytest.importorskip("xgrammar")

GOOD = Grammar(GrammarKind.REGEX, "[a-z]+")
RULES = [f'r{i} ::= r{i + 1} r{i + 1} | "x{i}"' for i in range(6000)]
SLOW = Grammar(GrammarKind.EBNF, "\n".join([*RULES, 'r6000 ::= "y"', "root ::= r0"]))
# Its pattern is tried on a name in as many ways as the name has parts.
TRIED = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "object", "patternProperties": {"(a+)+$": {}}, "properties": {"a" * 60 + "!": {}}}),
)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


def limits(folder: Path, **changes: float) -> GrammarLimits:
    values = {"timeout_s": 1.0, "memory_mib": 256} | changes
    return GrammarLimits(str(folder), VOCAB_SIZE, (EOS_ID,), **values)  # type: ignore[arg-type]


def test_verdicts(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")

    async def scenario() -> None:
        checks = GrammarChecks(limits(folder))
        try:
            await checks.warm()
            warmed = checks._process
            await checks.check(GOOD)
            assert checks._process is warmed is not None
            for _ in range(2):
                with pytest.raises(InvalidRequestError, match="not closed") as caught:
                    await checks.check(Grammar(GrammarKind.REGEX, "(a"))
                assert (caught.value.field, caught.value.value) == ("sampling.grammar.regex", "(a")
            unread = Grammar(GrammarKind.JSON_SCHEMA, f'{{"type": "integer", "minimum": {10**400}}}')
            with pytest.raises(InvalidRequestError, match="refused: the grammar library cannot read it"):
                await checks.check(unread)  # the library says nothing of it
            for _ in range(2):
                assert (await checks.check(Grammar(GrammarKind.JSON_SCHEMA, "true"))).source == "{}"
            for slow in (SLOW, TRIED):
                with pytest.raises(InvalidRequestError, match="longer than 1 s"):
                    await checks.check(slow)
            with pytest.raises(InvalidRequestError, match="longer than 1 s"):
                await asyncio.wait_for(checks.check(SLOW), 0.5)  # the verdict is kept
            cut_off = asyncio.create_task(checks.check(Grammar(GrammarKind.REGEX, "b")))
            await asyncio.sleep(0.1)  # while its process starts
            cut_off.cancel()
            await asyncio.gather(cut_off, return_exceptions=True)
            await checks.check(Grammar(GrammarKind.REGEX, "c"))
        finally:
            checks.close()

    run(scenario())


def test_memory_has_an_end(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    greedy = Grammar(GrammarKind.CHOICE, json.dumps([f"c{i}" * 10 for i in range(2000)]))

    async def scenario() -> None:
        checks = GrammarChecks(limits(folder, timeout_s=60, memory_mib=4))
        try:
            with pytest.raises(InvalidRequestError, match="more than 4 MiB"):
                await checks.check(greedy)
            await checks.check(GOOD)
        finally:
            checks.close()

    run(scenario())
