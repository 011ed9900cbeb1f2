"""Compiles grammars by llguidance.

That may take long, for instance a second for a hostile regex, so it runs in threads outside the step loop.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.black_box import BLACK_BOX, compile_key
from engine.errors import InvalidParameter, Overloaded
from engine.fairness.compile_queue import CompileQueue
from engine.grammars.gbnf import gbnf_to_lark
from engine.grammars.grammar import CompiledGrammar, Grammar, compute_mask, one_line
from engine.grammars.json_schema import enforceable
from engine.text.tokenizer_files import read_tokenizer
from engine.wire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_CACHED_GRAMMARS = 128
COMPILE_TIMEOUT_S = 10.0
THREADS = 4
MAX_LEXER_STATES = 20_000  # per request, of 1 to 2 kB each


@dataclass(slots=True)
class _CachedGrammar:
    compiled: Future[CompiledGrammar]
    wanted_until: float
    """Time at which the last request waiting for the grammar gives up."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A request's grammar while it is being compiled."""

    params: StructuredOutputsParams
    compiled: Future[CompiledGrammar]
    output: list[int]
    deadline: float

    def finished(self, now: float) -> bool:
        return self.compiled.done() or now >= self.deadline


class GrammarCompiler:
    """Compiles grammars in its own threads, and caches them.

    If llguidance is not installed, or cannot read the model's tokenizer, only requests with a grammar are refused.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int], *, closed: bool = True):
        """Load the tokenizer. Do this before requests run: it holds the GIL for 1 s per 150,000 tokens.

        closed: default of `disable_additional_properties`.
        """
        self._closed = closed
        self._num_bytes = -(-vocab_size // 32) * 4
        threads = min(THREADS, os.cpu_count() or 1)
        self._queue = CompileQueue[CompiledGrammar](threads)
        self._matchers = ThreadPoolExecutor(threads, thread_name_prefix="token-mask")
        self._cache: OrderedDict[tuple[str, str, bool | None], _CachedGrammar] = OrderedDict()
        self._problem = ""
        try:
            from llguidance import LLTokenizer

            self._tokenizer = LLTokenizer(
                read_tokenizer(folder).to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
            )
        except ModuleNotFoundError as error:
            self._problem = f"left out, because {error.name} is not installed where the engine runs"
        except Exception as error:  # noqa: BLE001 - in any case the model can be served without grammars
            self._problem = f"left out: this model's tokenizer cannot be used for it ({one_line(str(error))})"

    def start(self, params: StructuredOutputsParams, output: list[int], now: float, client: str = "") -> Compilation:
        """Start to compile a grammar, unless it is cached. output: tokens that the request already has. client: client
        to whom a new compilation is charged."""
        if params.disable_additional_properties is None:
            params = msgspec.structs.replace(params, disable_additional_properties=self._closed)
        key, deadline = (params.kind, params.text, params.disable_additional_properties), now + COMPILE_TIMEOUT_S
        cached = self._cache.get(key)
        if cached is None or _was_refused(cached.compiled):
            cached = self._cache[key] = _CachedGrammar(Future(), deadline)
            cached.compiled = self._queue.submit(client, len(key[1]), partial(self._compile_wanted, params, cached))
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        cached.wanted_until = max(cached.wanted_until, deadline)
        self._cache.move_to_end(key)
        return Compilation(params, cached.compiled, output, deadline)

    def finish(self, compilation: Compilation) -> Grammar:
        """Return the grammar. Raises InvalidParameter if it is invalid or takes too long, Overloaded if it was never
        started."""
        params, compiled = compilation.params, compilation.compiled
        if not compiled.done():
            if not compiled.running():
                raise _never_began()
            raise params.invalid(f"simple enough to be compiled in {COMPILE_TIMEOUT_S:.0f} s")
        try:
            return Grammar(params, compiled.result(), compilation.output, self._matchers)
        except InvalidParameter as error:  # it may name the parameter of another request, so raise it with this one's
            raise params.invalid(error.limit) from None

    def close(self) -> None:
        self._queue.close()
        self._matchers.shutdown(wait=False, cancel_futures=True)

    def _compile_wanted(self, params: StructuredOutputsParams, cached: _CachedGrammar) -> CompiledGrammar:
        """Compile a grammar. Raises InvalidParameter, or Overloaded if no request is waiting for it any longer."""
        if time.monotonic() >= cached.wanted_until:
            raise _never_began()
        with BLACK_BOX.doing(compile_key(params.kind, params.text)):
            return self._compile(params)

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        if self._problem:
            raise params.invalid(self._problem)
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._tokenizer, source(params), log_level=0, limits=limits())
            # lexer states computed here are shared by all copies of the matcher
            mask = b"" if matcher.is_error() else compute_mask(matcher, self._num_bytes)
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception, and fails this grammar only
            raise params.invalid(expected(params, str(error))) from None
        if matcher.is_error():
            raise params.invalid(expected(params, matcher.get_error()))
        if not any(mask):
            raise params.invalid(expected(params, "no answer is possible"))
        return CompiledGrammar(matcher, mask)


def _never_began() -> Overloaded:
    return Overloaded(f"the grammars of other requests took more than {COMPILE_TIMEOUT_S:.0f} s to compile")


def _was_refused(compiled: Future[CompiledGrammar]) -> bool:
    return compiled.done() and isinstance(compiled.exception(), Overloaded)


def limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def source(params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's format. Raises SchemaError and GbnfError."""
    from llguidance import LLMatcher

    match params.kind:
        case "json" | "json_object":
            schema = enforceable(json.loads(params.text), closed=params.disable_additional_properties is not False)
            return LLMatcher.grammar_from_json_schema(schema)
        case "regex":
            return LLMatcher.grammar_from_regex(params.text)
        case "choice":
            # Lark has the same escapes as JSON strings
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in params.choice or []))
        case "grammar":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(params.text) if params.is_gbnf else params.text)


def expected(params: StructuredOutputsParams, problem: str) -> str:
    """Return what a valid grammar would be, for the error about a grammar with this problem."""
    valid = {
        "json": "a JSON schema that can be enforced",
        "json_object": "left out",
        "regex": "a regular expression in Rust's syntax",
        "choice": "texts that this model can produce",
        "grammar": "a grammar in llguidance's Lark or in GBNF",
    }
    return f"{valid[params.kind]} ({one_line(problem)})"
