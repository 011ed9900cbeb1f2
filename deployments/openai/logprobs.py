"""Names of tokens in responses, and log-probabilities of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.openai.response_bodies import PromptLogprob, PromptLogprobs
from engine.text.tokenizer import Tokenizer
from engine.wire.token_delta import TokenLogprob


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """Return a token's text; with `as_id`, the name `token_id:N` that vLLM gives it."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], count: int) -> PromptLogprobs:
    """Return the prompt's token at each position, and the `count` most likely tokens there."""
    text, result = tokenizer.token_text, PromptLogprobs()
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        top = {i: PromptLogprob(p, rank, text(i)) for rank, (i, p) in enumerate(entry.top[:count], 1)}
        result.append({entry.token_id: PromptLogprob(entry.logprob, entry.rank, text(entry.token_id)), **top})
    return result
