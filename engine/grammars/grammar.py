"""The state of an output in its grammar, matched token by token by llguidance.

That may take long, so masks are computed in threads outside the step loop (llguidance releases the GIL). A request
waits for its own masks; other requests wait at most MASK_WAIT_S.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InvalidParameter
from engine.wire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASK_WAIT_S = 0.005  # that a step waits for a mask, once; most take 10 to 100 us, but new lexer states take longer
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

    def __init__(
        self,
        params: StructuredOutputsParams,
        compiled: CompiledGrammar,
        output: list[int],
        threads: ThreadPoolExecutor,
    ):
        """params: what the request asks for. output: tokens that the output already has."""
        self.is_done = False  #: whether the output is complete, so that only its end may follow
        self.drafts: list[int] = []  #: guesses of the next tokens, for which there are masks
        self.forced = False  #: whether the grammar allows no tokens but the drafts
        self.error: str | None = None  #: reason why no token is allowed any more
        self._params, self._matcher = params, compiled.matcher.deep_copy()
        self._num_bytes = len(compiled.mask)
        self._threads = threads
        self._requested_at = time.monotonic()
        if output:
            self._masks = threads.submit(self._resume, output)
        else:
            self._masks = Future()
            self._masks.set_result([compiled.mask])

    @property
    def refusal(self) -> InvalidParameter | None:
        return None if self.error is None else self._params.invalid(f"simple enough to follow ({self.error})")

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


def compute_mask(matcher: LLMatcher, num_bytes: int) -> bytes:
    """Return a mask of the tokens that may come next: one bit per token of the vocabulary, lowest first, in 32-bit
    words."""
    mask = np.empty(num_bytes, dtype=np.uint8)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, num_bytes)
    return mask.tobytes()


def one_line(text: str) -> str:
    """Return llguidance's message on one line, or an explanation if the message is only the name of an error."""
    for name, meaning in STOP_REASONS.items():
        if name in text:
            return meaning
    return " ".join(text.split())[:MAX_REASON]
