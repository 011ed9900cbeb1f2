"""Makes the prompts of embeddings, classes and scores, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.errors import InvalidParameter, RequestError
from engine.pooling.score_prompt import names_roles, score_prompt
from engine.pooling.text_encoder import TextEncoder
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.parts.pooling import PoolingParams, SupportedTasks

YES, NO = ("yes", "no")
# sentence-transformers' encode_query and encode_document use the first of these prompts that a model has
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """One prompt to pool."""

    token_ids: list[int]
    params: PoolingParams


def refuse_instruction(instruction: str | None) -> None:
    """Raise RequestError if there is an instruction. Called for models whose prompt has no place for one."""
    if instruction is not None:
        raise RequestError("instruction must be left out, because this model takes none", "instruction")


class PoolingPrompts:
    """Makes the prompts of embeddings, classes and scores for one model."""

    def __init__(self, tokenizer: ChatTokenizer, supported: SupportedTasks, max_model_len: int):
        self._tokenizer, self._supported, self._max_model_len = tokenizer, supported, max_model_len
        self._encoder = TextEncoder(tokenizer)
        self._query: tuple[str, int | None, list[int]] | None = None  # the last query, its limit in tokens, its tokens
        self._has_template = supported.score_token_ids is not None or names_roles(tokenizer.chat_template)

    def of_texts(
        self,
        prompts: Sequence[str | list[int]],
        params: PoolingParams,
        prompt_name: str | None = None,
        *,
        usual_prompts: Sequence[str] = (),
        add_special_tokens: bool = True,
    ) -> list[PoolingPrompt]:
        """Return one prompt for each text or list of token ids, for any task but `score`.

        prompt_name: name of the model's prompt to put in front of each text; if None, the first of `usual_prompts` that
        the model has, else the model's default. Raises InvalidParameter for a name that the model does not have.
        """
        kept, before = self._kept(params), self._prompt(prompt_name, usual_prompts)
        texts = [before + prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._encoder.encode(texts, kept, add_special_tokens))
        own = [next(encoded) if isinstance(prompt, str) else list(prompt)[:kept] for prompt in prompts]
        return [PoolingPrompt(token_ids, params) for token_ids in own]

    def of_queries(self, queries: Sequence[str], params: PoolingParams) -> list[PoolingPrompt]:
        """Return the prompts of search queries."""
        return self.of_texts(queries, params, usual_prompts=QUERY_PROMPTS)

    def of_documents(self, documents: Sequence[str], params: PoolingParams) -> list[PoolingPrompt]:
        return self.of_texts(documents, params, usual_prompts=DOCUMENT_PROMPTS)

    def score(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, instruction: str | None = None
    ) -> list[PoolingPrompt]:
        """Return one prompt for each pair of query and document, for a model that reads both together.

        A model that generates, or whose chat template knows the roles of queries and documents, reads a prompt with
        both. Any other reads them as a pair: a query is then tokenized only once if consecutive pairs have the same
        query, even in different calls.
        """
        kept, generates = self._kept(params), "generate" in self._supported
        if generates or self._has_template:
            ids = self._yes_and_no() if generates else []
            params = msgspec.structs.replace(params.asking("score"), score_token_ids=ids)
            return [PoolingPrompt(self._reranker_prompt(*pair, instruction, kept), params) for pair in pairs]
        refuse_instruction(instruction)
        documents = self._encoder.encode_parts([document for _, document in pairs], kept)
        prompts = []
        for (query, _), document in zip(pairs, documents, strict=True):
            token_ids, second = self._encoder.join_pair(self._query_tokens(query, kept), document, kept)
            prompts.append(
                PoolingPrompt(token_ids, msgspec.structs.replace(params.asking("score"), token_types_from=second))
            )
        return prompts

    def _query_tokens(self, query: str, kept: int | None) -> list[int]:
        if self._query is None or self._query[:2] != (query, kept):
            self._query = query, kept, self._encoder.encode_parts([query], kept)[0]
        return self._query[2]

    def _prompt(self, name: str | None, usual: Sequence[str]) -> str:
        prompts = self._supported.prompts
        if name is None:
            name = next((name for name in usual if name in prompts), self._supported.default_prompt_name)
        elif name not in prompts:
            known = ", ".join(prompts)
            limit = f"one of the model's prompts ({known})" if known else "left out, because this model has no prompts"
            raise InvalidParameter("prompt_name", name, limit)
        return "" if name is None else prompts[name]

    def _kept(self, params: PoolingParams) -> int | None:
        return self._max_model_len if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens

    def _reranker_prompt(self, query: str, document: str, instruction: str | None, kept: int | None) -> list[int]:
        prompt, end = score_prompt(self._tokenizer, query, document, instruction, has_template=self._has_template)
        if kept is None:
            return self._tokenizer.encode(prompt, add_special_tokens=False)
        token_ids = self._tokenizer.encode_truncated(prompt, kept + 1, "right", add_special_tokens=False)
        if len(token_ids) <= kept:
            return token_ids
        after = self._tokenizer.encode(end, add_special_tokens=False)
        return (token_ids[: max(0, kept - len(after))] + after)[:kept]  # cuts the document at its end

    def _yes_and_no(self) -> list[int]:
        if self._supported.score_token_ids is not None:
            return list(self._supported.score_token_ids)
        found = [token for word in (YES, NO) if (token := self._tokenizer.token_id(word)) is not None]
        if len(found) < 2:
            raise RequestError(f"this model cannot score: {YES!r} and {NO!r} are not both in its vocabulary", "model")
        return found
