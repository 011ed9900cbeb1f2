"""Turns one sequence's deltas into text."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.text.detokenizer import Detokenizer, TokenBytes
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta, TokenLogprob


class TextChunk(msgspec.Struct):
    """Text of one delta. A msgspec struct, because a stream makes one per token."""

    text: str
    token_ids: list[int]  #: tokens taken; their text may still be held back (see Detokenizer)
    offsets: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    finish_reason: Literal["stop", "length"] | None = None  #: set in the last chunk of a sequence
    stop_reason: str | int | None = None  #: the stop string or stop token id that ended it
    answer: bytes = b""  #: see TokenDelta
    index: int = 0  #: index of the sequence in its HTTP request


class TextStream:
    """Turns deltas into text, and ends the sequence at a stop string. The engine does not know stop strings.

    If a chunk has a finish_reason but its delta had none, the caller must abort the request in the engine.
    """

    def __init__(self, params: SamplingParams, tokenizer: TokenBytes, index: int = 0):
        """index: index of the sequence in its HTTP request, for its chunks."""
        self._index = index
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def add(self, delta: TokenDelta) -> TextChunk:
        """Return the text of `delta`, which must not report an error or an abort."""
        detokenizer = self._detokenizer
        hide_last = delta.finish_reason == "stop" and not delta.text_complete and not self._include_stop
        decoded = detokenizer.add(delta.token_ids, hide_last=hide_last)
        taken = len(decoded.offsets)
        chunk = TextChunk(
            text=decoded.text,
            token_ids=delta.token_ids[:taken],
            offsets=decoded.offsets,
            logprobs=None if delta.logprobs is None else delta.logprobs[:taken],
            prompt_logprobs=delta.prompt_logprobs,
            index=self._index,
        )
        if detokenizer.stopped_by is None and delta.finish_reason is not None:
            chunk.text += detokenizer.finish()  # the text held back may contain a stop string
            assert delta.finish_reason in ("stop", "length")
            chunk.finish_reason, chunk.stop_reason = delta.finish_reason, delta.stop_reason
            chunk.answer = delta.answer
        if detokenizer.stopped_by is not None:
            chunk.finish_reason, chunk.stop_reason = "stop", detokenizer.stopped_by
        return chunk
