"""Pooling parameters of a request: it asks for one vector or one number instead of tokens. Names and meaning follow
vLLM's PoolingParams."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import InvalidParameter, UnsupportedTask
from engine.wire.sampling_params import check

Task = Literal["generate", "embed", "score"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pooling parameters of a request. Raises InvalidParameter for a value out of its range."""

    task: Literal["embed", "score"] = "embed"
    """`embed` makes a vector of a text; `score` makes one number of a query and a document."""
    dimensions: int | None = None
    """Numbers of the embedding to keep, for models whose embeddings may be cut (arXiv:2205.13147); None keeps all."""
    use_activation: bool | None = None
    """True to scale an embedding to length 1, and to pass a score through a sigmoid; None does what the model's
    files say."""
    truncate_prompt_tokens: int | None = None
    """Tokens to keep of a longer prompt, -1 for as many as the model takes; None refuses a prompt that is too long.
    Obeyed by the process that has the tokenizer."""
    token_types_from: int | None = None
    """Position from which tokens belong to the second text of a pair, for models with token types (BERT)."""
    score_token_ids: list[int] = []
    """Tokens that mean yes and no to a generative reranker, filled in by the process that has the tokenizer."""

    def __post_init__(self) -> None:
        check(self.dimensions is None or self.dimensions >= 1, "dimensions", self.dimensions, "at least 1")
        kept = self.truncate_prompt_tokens
        check(kept is None or kept == -1 or kept >= 1, "truncate_prompt_tokens", kept, "-1, or at least 1")
        check(len(self.score_token_ids) in (0, 2), "score_token_ids", self.score_token_ids, "two token ids, or none")


class SupportedTasks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tasks of a model, and the settings of its folder for embeddings and scores."""

    names: tuple[Task, ...] = ("generate",)
    embedding_size: int = 0
    matryoshka_dimensions: tuple[int, ...] = ()
    """Sizes that embeddings may be cut to; empty for any."""
    score_token_ids: tuple[int, int] | None = None
    """Tokens that mean yes and no to a generative reranker, if its files name them."""
    prompts: dict[str, str] = {}
    """Texts that belong in front of a text to embed, by name."""
    default_prompt_name: str | None = None

    def __contains__(self, task: Task) -> bool:
        return task in self.names

    def check(self, task: Task, dimensions: int | None = None, model: str = "this model") -> None:
        """Raise UnsupportedTask, or InvalidParameter for dimensions that its embeddings cannot have.

        model: how errors name the model.
        """
        if task not in self.names:
            raise UnsupportedTask(task, list(self.names), model)
        if dimensions is None:
            return
        sizes = self.matryoshka_dimensions
        if sizes and dimensions not in sizes:
            limit = f"one of {', '.join(map(str, sizes))}, which the model was trained for"
            raise InvalidParameter("dimensions", dimensions, limit)
        if dimensions > self.embedding_size:
            limit = f"at most {self.embedding_size}, the size of this embedding"
            raise InvalidParameter("dimensions", dimensions, limit)
