"""Grammars of requests that came in, compiled beside the steps of the engine (runtime.md section 7.1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deeptwin.reference.config import GrammarKind, GrammarRequest, Vocabulary
from deeptwin.reference.serving_checks import expect_request

CompileFn = Callable[[GrammarRequest], Any]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A request that may be scheduled, with the grammar for its `Automaton`; or one that has failed, and why."""

    name: Hashable
    request: GrammarRequest
    grammar: Any = None
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class _Pending:
    request: GrammarRequest
    since: float
    future: Future[tuple[Any, str, float]]


class GrammarPool:
    """Threads that compile grammars; a request enters the queue of the scheduler when it comes out of `finished`.

    The queue is strict, so a request that was still compiled inside of it would hold up all behind it. A request whose
    grammar is wrong, or was not done `limit` seconds after it came, comes out as failed, and stays failed. A thread
    cannot be stopped: what ran out of time goes on in its thread, and its result is dropped.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        workers: int = 4,
        limit: float = 20.0,
        cache_bytes: int = 10 * 2**30,
        compile_grammar: CompileFn | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if workers <= 0:
            raise ValueError(f"workers: expected a positive number, got {workers}")
        if not limit > 0:
            raise ValueError(f"limit: expected seconds above 0, got {limit}")
        if cache_bytes < 0:
            raise ValueError(f"cache_bytes: expected a number from 0 (no cache) on, got {cache_bytes}")
        self.vocabulary = vocabulary
        self.limit = limit
        self.clock = clock
        self.compile_grammar = compile_grammar or _of_the_engine(vocabulary, cache_bytes)
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self.pending: dict[Hashable, _Pending] = {}

    def submit(self, name: Hashable, request: GrammarRequest) -> None:
        """Have the grammar of a request compiled.

        Raises:
            ValueError: a request of this name is being compiled; its trigger or bound token is not in the vocabulary.
        """
        expect_request(request, self.vocabulary)
        if name in self.pending:
            raise ValueError(f"name: expected one that is not being compiled, got {name!r}")
        future = self.threads.submit(self._compiled, request)
        self.pending[name] = _Pending(request=request, since=self.clock(), future=future)

    def _compiled(self, request: GrammarRequest) -> tuple[Any, str, float]:
        """The grammar or what is wrong with it, and when that was known."""
        try:
            return self.compile_grammar(request), "", self.clock()
        except Exception as error:  # whatever a grammar does to the compiler, it fails its own request alone
            return None, f"{type(error).__name__}: {error}", self.clock()

    def finished(self) -> list[Compiled]:
        """Requests that are done or have failed since the last call, in the order in which they came."""
        found, now = [], self.clock()
        for name, entry in list(self.pending.items()):
            is_done = entry.future.done()  # asked once: it may become so meanwhile
            grammar, failure, known = entry.future.result() if is_done else (None, "", now)
            is_late = known - entry.since > self.limit
            if not is_done and not is_late:
                continue
            if is_late:
                entry.future.cancel()
                grammar, failure = None, f"not compiled in {self.limit:g} seconds"
            del self.pending[name]
            found.append(Compiled(name=name, request=entry.request, grammar=grammar, failure=failure))
        return found

    def drop(self, name: Hashable) -> None:
        """Forget a request that has ended while it was compiled.

        Raises:
            ValueError: no request of this name is being compiled.
        """
        if name not in self.pending:
            raise ValueError(f"name: expected one that is being compiled, got {name!r}")
        self.pending.pop(name).future.cancel()

    def close(self) -> None:
        """Take nothing more and wait for what is being compiled; what has not begun never begins."""
        self.threads.shutdown(cancel_futures=True)
        self.pending.clear()


def _of_the_engine(vocabulary: Vocabulary, cache_bytes: int) -> CompileFn:
    """One compiler of two threads for all, which keeps what it compiled."""
    compiler = grammar_compiler(vocabulary, threads=2, cache_bytes=cache_bytes)
    return lambda request: compiled_by(compiler, request.kind, request.schema)


def grammar_compiler(vocabulary: Vocabulary, *, threads: int, cache_bytes: int) -> Any:
    """The engine's compiler, which may be called from several threads; 0 bytes: it keeps nothing."""
    limit = cache_bytes or -1
    return engine().GrammarCompiler(
        _tokenizer(vocabulary), max_threads=threads, cache_enabled=cache_bytes > 0, cache_limit_bytes=limit
    )


def compiled_by(compiler: Any, kind: GrammarKind, schema: str) -> Any:
    """A schema as the engine's grammar.

    Raises:
        ValueError: the schema is wrong.
    """
    try:
        if kind is GrammarKind.JSON:
            return compiler.compile_json_schema(schema, strict_mode=True)
        return compiler.compile_regex(schema) if kind is GrammarKind.REGEX else compiler.compile_grammar(schema)
    except RuntimeError as error:
        raise ValueError(f"schema: expected {kind.value}, got {schema!r}: {error}") from error


@lru_cache(maxsize=8)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    return engine().TokenizerInfo(
        list(vocabulary.tokens),
        vocab_type=engine().VocabType.RAW,
        vocab_size=len(vocabulary.tokens),
        stop_token_ids=[vocabulary.eos],
    )


def engine() -> Any:
    """The module of xgrammar.

    Raises:
        ImportError: xgrammar is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise ImportError("xgrammar is not installed: pip install 'deeptwin[engine]'") from error
    return xgrammar
