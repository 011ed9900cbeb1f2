"""Grammars that constrain an output: compiled, then matched token by token, by llguidance.

Both may take long, a second for a hostile regex, so both run in threads, outside the step loop (llguidance releases the
GIL): a request waits for its own grammar and masks, and others wait for them no longer than MASK_WAIT_S.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InvalidParameter, Overloaded
from engine.fairness.compile_queue import CompileQueue
from engine.text.json_schema import without_annotations
from engine.text.tokenizer_files import read_tokenizer
from engine.wire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

MAX_CACHED_GRAMMARS = 128
COMPILE_TIMEOUT_S = 10.0
MASK_WAIT_S = 0.005  # for which a step waits once per mask; most take 10 to 100 us, new states of a lexer longer
THREADS = 4
MAX_LEXER_STATES = 20_000  # 1 to 2 kB each, per request
# At most one space, or a line break and its indentation, as in llama.cpp: a weak model that may put any number of
# blanks between two tokens of JSON would put nothing else.
WHITESPACE = "( |\n[ \t]{0,20})?"
STOP_REASONS = {  # llguidance's names, where it says no more
    "NoExtension": "no token of this model can continue the output; allow more, or give it an end",
    "LexerTooComplex": "its regular expressions have too many states; make them simpler or shorter",
    "ParserTooComplex": "it can be read in too many ways; make it simpler",
    "can't determine decoder type": "a grammar needs the bytes of each token, which only byte-level and byte-fallback "
    "tokenizers tell",
}
MAX_FORCED = 32  # tokens that are drafted at once because no others may come
MAX_REASON = 300  # characters of llguidance's error messages


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar, before any token."""

    matcher: LLMatcher
    mask: bytes  #: the tokens that may come first


class Grammar:
    """The state of one output in its grammar. One thread at a time."""

    constrains = True

    def __init__(self, compiled: CompiledGrammar, output: list[int], threads: ThreadPoolExecutor):
        """output: tokens that it has already."""
        self.is_done = False  #: the output is complete; only its end may follow
        self.drafts: list[int] = []  #: tokens that may come next, for which there are masks
        self.forced = False  #: no others than these may come
        self.error: str | None = None  #: the reason that no token is allowed any more
        self._matcher = compiled.matcher.deep_copy()
        self._num_bytes = len(compiled.mask)
        self._threads = threads
        self._requested_at = time.monotonic()
        if output:
            self._masks = threads.submit(self._resume, output)
        else:
            self._masks = Future()
            self._masks.set_result([compiled.mask])

    def waits(self, in_flight: int) -> bool:
        """Return whether no step can be planned yet: the next mask depends on one of the `in_flight` tokens, or is
        still being computed."""
        return in_flight > 0 or not self.ready()

    def ready(self) -> bool:
        """Return whether the masks are ready, after waiting for them up to MASK_WAIT_S."""
        if not self._masks.done():
            with suppress(TimeoutError):
                self._masks.result(max(0.0, self._requested_at + MASK_WAIT_S - time.monotonic()))
        return self._masks.done()

    def masks(self, num_drafts: int = 0) -> bytes:
        """Return which tokens may come next, as `compute_mask` does, then which after each of the first drafts."""
        return b"".join(self._masks.result()[: num_drafts + 1])

    def accept(self, token: int) -> None:
        """Continue the output with this token. `start_masks` must follow before the next is sampled."""
        wait([self._masks])  # done by now, unless another engine chose the token
        self._consume([token])

    def start_masks(self, guess: list[int] | None = None) -> None:
        """Compute the next masks.

        guess: tokens that may come next, to become `drafts` as far as the grammar allows them. Tokens that it forces
        take their place. None if nothing is to be drafted.
        """
        self._requested_at = time.monotonic()
        self._masks = self._threads.submit(self._compute_masks, guess)

    def _resume(self, output: list[int]) -> list[bytes]:
        self._consume(output)
        return [self._compute_mask()]

    def _compute_masks(self, guess: list[int] | None) -> list[bytes]:
        """Return a mask for the next token, and one for that after each of `drafts`, which it sets."""
        masks, self.drafts = [self._compute_mask()], []
        if guess is not None and self.error is None:
            with suppress(BaseException):  # a panic in Rust is no Exception, and the first mask is good
                ahead = self._matcher.deep_copy()
                forced = ahead.compute_ff_tokens()[:MAX_FORCED]
                self.forced = bool(forced)
                for token in forced or guess:
                    if ahead.is_stopped() or not ahead.try_consume_tokens([token]):
                        break
                    masks.append(compute_mask(ahead, self._num_bytes))
                    self.drafts.append(token)
        return masks

    def _consume(self, tokens: list[int]) -> None:
        self._matcher.consume_tokens(tokens)
        self._note_error()
        self.is_done = self.error is None and self._matcher.is_stopped()

    def _compute_mask(self) -> bytes:
        """Return a mask that allows nothing after an error."""
        try:
            mask = compute_mask(self._matcher, self._num_bytes)
            self._note_error()
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception, and fails this output only
            self.error = one_line(str(error))
        return mask if self.error is None else bytes(self._num_bytes)

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = one_line(self._matcher.get_error())


@dataclass(slots=True)
class _CachedGrammar:
    compiled: Future[CompiledGrammar]
    wanted_until: float
    """When the last request that waits for it gives up."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A request's grammar while it is compiled."""

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

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]):
        """Load the tokenizer, which holds the GIL for a second with 150,000 tokens: so not while requests run."""
        self._num_bytes = -(-vocab_size // 32) * 4
        threads = min(THREADS, os.cpu_count() or 1)
        self._queue = CompileQueue[CompiledGrammar](threads)
        self._matchers = ThreadPoolExecutor(threads, thread_name_prefix="token-mask")
        self._cache: OrderedDict[tuple[str, str], _CachedGrammar] = OrderedDict()
        self._problem = ""
        try:
            from llguidance import LLTokenizer

            self._tokenizer = LLTokenizer(
                read_tokenizer(folder).to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
            )
        except ModuleNotFoundError as error:
            self._problem = f"left out: {error.name} is not installed where the engine runs"
        except Exception as error:  # noqa: BLE001 - in any case the model can be served without grammars
            self._problem = f"left out: this model's tokenizer cannot be used for it ({one_line(str(error))})"

    def start(self, params: StructuredOutputsParams, output: list[int], now: float, client: str = "") -> Compilation:
        """Start to compile, unless it is cached. output: tokens that the request has already. client: whose turn it
        takes, if the same was not requested before."""
        key, deadline = (params.kind, params.text), now + COMPILE_TIMEOUT_S
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
        """Return the grammar. Raises InvalidParameter if it fails or takes too long, Overloaded if it never began."""
        params, compiled = compilation.params, compilation.compiled
        if not compiled.done():
            if not compiled.running():
                raise _never_began()
            raise params.invalid(f"simple enough to be compiled in {COMPILE_TIMEOUT_S:.0f} s")
        try:
            return Grammar(compiled.result(), compilation.output, self._matchers)
        except InvalidParameter as error:  # made for the first request, perhaps with another parameter
            raise params.invalid(error.limit) from None

    def close(self) -> None:
        self._queue.close()
        self._matchers.shutdown(wait=False, cancel_futures=True)

    def _compile_wanted(self, params: StructuredOutputsParams, cached: _CachedGrammar) -> CompiledGrammar:
        """Raises Overloaded if no request waits for it any more, InvalidParameter."""
        if time.monotonic() >= cached.wanted_until:
            raise _never_began()
        return self._compile(params)

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        if self._problem:
            raise params.invalid(self._problem)
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._tokenizer, source(params), log_level=0, limits=limits())
            # every copy has the states that the lexer computes here
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


def compute_mask(matcher: LLMatcher, num_bytes: int) -> bytes:
    """Return which tokens may come next: one bit per token of the vocabulary, lowest first, in 32-bit words."""
    mask = np.empty(num_bytes, dtype=np.uint8)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, num_bytes)
    return mask.tobytes()


def source(params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's format. Raises any error of its GBNF translator, RecursionError too."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match params.kind:
        case "json" | "json_object":
            schema = json.dumps(without_annotations(json.loads(params.text)))
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(params.text)
        case "choice":
            # escapes of JSON strings are Lark's too
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in params.choice or []))
        case "grammar":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(params.text) if params.is_gbnf else params.text)


def expected(params: StructuredOutputsParams, problem: str) -> str:
    """Return what would have been valid instead of a grammar with this problem."""
    valid = {
        "json": "a JSON schema that can be enforced",
        "json_object": "left out",
        "regex": "a regular expression in Rust's syntax",
        "choice": "texts that this model can produce",
        "grammar": "a grammar in llguidance's Lark or in GBNF",
    }
    return f"{valid[params.kind]} ({one_line(problem)})"


def one_line(text: str) -> str:
    """Return what llguidance says, in words that a client can do something with."""
    for name, meaning in STOP_REASONS.items():
        if name in text:
            return meaning
    return " ".join(text.split())[:MAX_REASON]
