"""Grammars that constrain an output: compiled, then matched token by token, by llguidance.

Both steps may take long, for instance a second for a hostile regex. So both run in threads outside the step loop
(llguidance releases the GIL). A request waits for its own grammar and masks; other requests wait at most MASK_WAIT_S.
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

import msgspec
import numpy as np

from engine.black_box import BLACK_BOX, compile_key
from engine.errors import InvalidParameter, Overloaded
from engine.fairness.compile_queue import CompileQueue
from engine.grammars.gbnf import gbnf_to_lark
from engine.text.tokenizer_files import read_tokenizer
from engine.wire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

MAX_CACHED_GRAMMARS = 128
COMPILE_TIMEOUT_S = 10.0
MASK_WAIT_S = 0.005  # that a step waits for a mask, once; most take 10 to 100 us, but new lexer states take longer
THREADS = 4
MAX_LEXER_STATES = 20_000  # per request, of 1 to 2 kB each
STOP_REASONS = {  # explanations for errors of which llguidance gives only a name
    "NoExtension": "no token of this model can continue the output; allow more texts, or let the output end here",
    "LexerTooComplex": "its regular expressions have too many states; make them simpler or shorter",
    "ParserTooComplex": "it is too ambiguous; make it simpler",
    "oneOf constraints": "the branches of a oneOf are not known to exclude each other; use anyOf",
    "can't determine decoder type": "a grammar needs the bytes of each token, which only byte-level "
    "and byte-fallback tokenizers provide",
}
MAX_FORCED = 32  # forced tokens that are drafted at once
MAX_REASON = 300  # characters of llguidance's error messages


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar in its initial state."""

    matcher: LLMatcher
    mask: bytes  #: mask of the tokens that may come first


class Grammar:
    """State of one output in its grammar. Used by one thread at a time."""

    constrains = True

    def __init__(self, compiled: CompiledGrammar, output: list[int], threads: ThreadPoolExecutor):
        """output: tokens that the output already has."""
        self.is_done = False  #: whether the output is complete, so that only its end may follow
        self.drafts: list[int] = []  #: guesses of the next tokens, for which there are masks
        self.forced = False  #: whether the grammar allows no tokens but the drafts
        self.error: str | None = None  #: reason why no token is allowed any more
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
        """Return whether no step can be planned yet, because the next mask depends on one of the `in_flight` tokens or
        is still being computed."""
        return in_flight > 0 or not self.ready()

    def ready(self) -> bool:
        """Return whether the masks are ready. Waits for them, up to MASK_WAIT_S after they were requested."""
        if not self._masks.done():
            with suppress(TimeoutError):
                self._masks.result(max(0.0, self._requested_at + MASK_WAIT_S - time.monotonic()))
        return self._masks.done()

    def masks(self, num_drafts: int = 0) -> bytes:
        """Return the mask of the next token, as from `compute_mask`, then the mask after each of the first `num_drafts`
        drafts."""
        return b"".join(self._masks.result()[: num_drafts + 1])

    def accept(self, token: int) -> None:
        """Continue the output with this token. Call `start_masks` before the next token is sampled."""
        wait([self._masks])  # already done, unless another engine sampled the token
        self._consume([token])

    def start_masks(self, guess: list[int] | None = None) -> None:
        """Start to compute the next masks.

        guess: tokens that may come next; the grammar's longest allowed prefix of them becomes `drafts`. If the grammar
        forces the next tokens, those become `drafts` instead. None drafts nothing.
        """
        self._requested_at = time.monotonic()
        self._masks = self._threads.submit(self._compute_masks, guess)

    def _resume(self, output: list[int]) -> list[bytes]:
        self._consume(output)
        return [self._compute_mask()]

    def _compute_masks(self, guess: list[int] | None) -> list[bytes]:
        """Set `drafts`. Returns the mask of the next token, then the mask after each draft."""
        masks, self.drafts = [self._compute_mask()], []
        if guess is not None and self.error is None:
            with suppress(BaseException):  # a panic in Rust is not an Exception; the first mask is still valid
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
        """Return the mask of the next token; after an error, a mask that allows nothing."""
        try:
            mask = compute_mask(self._matcher, self._num_bytes)
            self._note_error()
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is not an Exception, and fails only this output
            self.error = one_line(str(error))
        return mask if self.error is None else bytes(self._num_bytes)

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = one_line(self._matcher.get_error())


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
            return Grammar(compiled.result(), compilation.output, self._matchers)
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


def compute_mask(matcher: LLMatcher, num_bytes: int) -> bytes:
    """Return a mask of the tokens that may come next: one bit per token of the vocabulary, lowest first, in 32-bit
    words."""
    mask = np.empty(num_bytes, dtype=np.uint8)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, num_bytes)
    return mask.tobytes()


def source(params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's format. Raises SchemaError and GbnfError."""
    from llguidance import LLMatcher

    from engine.grammars.json_schema import enforceable

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


def one_line(text: str) -> str:
    """Return llguidance's message on one line, or an explanation if the message is only the name of an error."""
    for name, meaning in STOP_REASONS.items():
        if name in text:
            return meaning
    return " ".join(text.split())[:MAX_REASON]
