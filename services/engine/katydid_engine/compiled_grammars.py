"""Grammars in the worker that samples: compiled again on a thread of their own while their request waits.

The face has compiled every grammar before, under limits of time and memory (``grammar_checks``), and only its text
travels: a compiled one can be a thousand times as long. XGrammar lets go of the interpreter while it compiles, so steps
go on meanwhile.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from katydid_engine.grammar import Grammar
from katydid_engine.grammar_state import GrammarState

if TYPE_CHECKING:
    import xgrammar

    from katydid_engine.grammar_compiler import GrammarCompiler

__all__ = ["CompiledGrammars"]

_CACHE_BYTES = 512 << 20
# Grammars of requests that are still to begin; more than an engine has waiting at a time as a rule.
_MOST_COMING = 1024


class CompiledGrammars:
    """Of one model; XGrammar is loaded with the first of them."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler: GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._coming: dict[bytes, Future[xgrammar.CompiledGrammar]] = {}

    def prepare(self, grammar: Grammar) -> None:
        """Begins to compile a grammar that will soon be asked for."""
        if grammar.digest not in self._coming:
            self._coming[grammar.digest] = self._thread.submit(self._compile, grammar)
        if len(self._coming) > _MOST_COMING:
            # Of a request that ended before it began, perhaps; if not, the compiler's cache still has it.
            del self._coming[next(iter(self._coming))]

    def begin(self, grammar: Grammar, stop_tokens: tuple[int, ...]) -> GrammarState:
        """The state before the first output token. Raises GrammarError."""
        import xgrammar

        self.prepare(grammar)
        # Results are kept by the compiler's own cache, whose size is bounded.
        compiled = self._coming.pop(grammar.digest).result()
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_tokens) or None)
        return GrammarState(matcher, grammar.begin_after, stop_tokens, self._vocab_size)

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        from katydid_engine.grammar_compiler import GrammarCompiler

        if self._compiler is None:
            self._compiler = GrammarCompiler(
                self._folder, self._vocab_size, self._eos_token_ids, cache_bytes=_CACHE_BYTES
            )
        return self._compiler.compile(grammar)
