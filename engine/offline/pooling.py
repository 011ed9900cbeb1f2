"""What is asked of the engine for an embedding or a score, in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.errors import RequestError
from engine.model.config import ModelConfig
from engine.text.score_prompt import score_prompt
from engine.text.tokenizer import Tokenizer
from engine.wire.pooling_params import PoolingParams

YES, NO = ("yes", "no")


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """One prompt to pool."""

    token_ids: list[int]
    params: PoolingParams


class PoolingPrompts:
    """Makes prompts of texts for one model."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, max_model_len: int):
        self._tokenizer, self._model, self._max_model_len = tokenizer, model, max_model_len

    def embed(self, prompts: Sequence[str | list[int]], params: PoolingParams) -> list[PoolingPrompt]:
        """Prompts of texts, or of token ids."""
        kept = self._kept(params)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._tokenizer.encode_for_pooling(texts, kept))
        own = [next(encoded)[0] if isinstance(prompt, str) else list(prompt)[:kept] for prompt in prompts]
        params = msgspec.structs.replace(params, task="embed")
        return [PoolingPrompt(token_ids, params) for token_ids in own]

    def score(
        self, query: str, documents: Sequence[str], params: PoolingParams, instruction: str | None
    ) -> list[PoolingPrompt]:
        """One prompt for each document, for a model that reads it together with the query."""
        kept = self._kept(params)
        if self._model.head == "lm":
            ids = self._yes_and_no()
            params = msgspec.structs.replace(params, task="score", score_token_ids=ids)
            return [PoolingPrompt(self._reranker_prompt(query, d, instruction, kept), params) for d in documents]
        if instruction is not None:
            raise RequestError("instruction must be left out: this model takes none", "instruction")
        encoded = self._tokenizer.encode_for_pooling([(query, document) for document in documents], kept)
        return [
            PoolingPrompt(token_ids, msgspec.structs.replace(params, task="score", token_types_from=second))
            for token_ids, second in encoded
        ]

    def _kept(self, params: PoolingParams) -> int | None:
        return self._max_model_len if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens

    def _reranker_prompt(self, query: str, document: str, instruction: str | None, kept: int | None) -> list[int]:
        has_template = self._model.pooling.score_token_ids is not None
        prompt, end = score_prompt(self._tokenizer, query, document, instruction, has_template=has_template)
        token_ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        if kept is None or len(token_ids) <= kept:
            return token_ids
        after = self._tokenizer.encode(end, add_special_tokens=False)
        return (token_ids[: max(0, kept - len(after))] + after)[:kept]  # what is cut is the document's end

    def _yes_and_no(self) -> list[int]:
        if self._model.pooling.score_token_ids is not None:
            return list(self._model.pooling.score_token_ids)
        found = [token for word in (YES, NO) if (token := self._tokenizer.token_id(word)) is not None]
        if len(found) < 2:
            raise RequestError(f"this model cannot score: {YES!r} and {NO!r} are not both tokens of it", "task")
        return found
