"""One sequence's deltas -> its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.text.detokenizer import Detokenizer, TokenBytes
from engine.wire.messages import TokenDelta, TokenLogprob
from engine.wire.sampling_params import SamplingParams


@dataclass(slots=True)
class TextChunk:
    """What one delta brought, as text.

    token_ids, logprobs, offsets: of the tokens taken, whose text may still be held back; see Detokenizer.
    finish_reason: set in the last chunk of a sequence; stop_reason is then the stop string or stop token id.
    index: which sequence of an HTTP request it belongs to.
    """

    text: str
    token_ids: list[int]
    offsets: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    index: int = 0


class TextStream:
    """Turns deltas into text and ends the sequence at a stop string, which the engine knows nothing of.

    After a chunk with a finish_reason whose delta had none, the engine has to be told to abort the request.
    """

    def __init__(self, params: SamplingParams, tokenizer: TokenBytes, index: int = 0):
        """index: of the chunks."""
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
        """`delta` must not report an error or an abort."""
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
            chunk.text += detokenizer.finish()  # what was held back may hold a stop string
            assert delta.finish_reason in ("stop", "length")
            chunk.finish_reason, chunk.stop_reason = delta.finish_reason, delta.stop_reason
        if detokenizer.stopped_by is not None:
            chunk.finish_reason, chunk.stop_reason = "stop", detokenizer.stopped_by
        return chunk
