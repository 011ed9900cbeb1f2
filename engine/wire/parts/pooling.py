"""Requests for vectors, classes or a score instead of tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from engine.errors import InvalidParameter, UnsupportedTask
from engine.wire.part_record import PartRecord
from engine.wire.sampling_params import check

WiderTask = Literal["token_embed", "classify", "token_classify"]
PoolingTask = Literal["embed", WiderTask, "score"]
Task = Literal["generate", PoolingTask]
OF_TOKENS: tuple[Task, ...] = ("token_embed", "token_classify")
"""Tasks that return a vector for each token of a prompt."""
EMBEDS: tuple[Task, ...] = ("embed", "token_embed")


class PoolingParams(PartRecord, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for vectors, classes or a score, after vLLM's PoolingParams. The request's `params` then have no effect.
    Raises InvalidParameter for a value out of its range."""

    part: ClassVar[str] = "pooling"

    task: Literal["embed", "score"] = "embed"
    """`embed` returns a vector for a text; `score` returns a number for a query and a document."""
    dimensions: int | None = None
    """Size to cut the embedding to, for models that allow it (arXiv:2205.13147); None keeps it whole."""
    use_activation: bool | None = None
    """Whether to scale an embedding to length 1, or to make a score or the numbers of classes probabilities; None
    follows the model's files."""
    truncate_prompt_tokens: int | None = None
    """Length to cut a longer prompt to, in tokens; -1 for the model's maximum; None refuses prompts that are too long.
    Applied by the process that has the tokenizer."""
    token_types_from: int | None = None
    """Position from which tokens belong to the second text of a pair, for models with token types (BERT)."""
    score_token_ids: list[int] = msgspec.field(default_factory=list)
    """Tokens by which a generative reranker answers yes and no; filled in by the process that has the tokenizer."""

    wider_task: WiderTask | None = None
    """Replaces `task`, whose values are those of the last version: `classify` returns a number for each class;
    `token_embed` and `token_classify` return a vector, or numbers for the classes, for each token."""

    def __post_init__(self) -> None:
        check(self.dimensions is None or self.dimensions >= 1, "dimensions", self.dimensions, "at least 1")
        kept = self.truncate_prompt_tokens
        check(kept is None or kept == -1 or kept >= 1, "truncate_prompt_tokens", kept, "-1, or at least 1")
        check(len(self.score_token_ids) in (0, 2), "score_token_ids", self.score_token_ids, "two token ids, or none")

    def asking(self, task: PoolingTask) -> PoolingParams:
        """Return the same for another task."""
        if task == "embed" or task == "score":
            return msgspec.structs.replace(self, task=task, wider_task=None)
        return msgspec.structs.replace(self, task="embed", wider_task=task)

    @property
    def asked(self) -> PoolingTask:
        """The task."""
        return self.wider_task or self.task

    @property
    def of_tokens(self) -> bool:
        """Whether each token of the prompt has a vector in the answer."""
        return self.asked in OF_TOKENS

    def without_text(self) -> PoolingParams:
        return PoolingParams(task=self.task, wider_task=self.wider_task)


class SupportedTasks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tasks that a model supports, with its folder's settings for embeddings and scores."""

    names: tuple[Task, ...] = ("generate",)
    embedding_size: int = 0
    matryoshka_dimensions: tuple[int, ...] = ()
    """Sizes to which embeddings can be cut; empty for any."""
    score_token_ids: tuple[int, int] | None = None
    """Tokens by which a generative reranker answers yes and no, if its files name them."""
    prompts: dict[str, str] = {}
    """Prefixes for texts to embed, by name."""
    default_prompt_name: str | None = None
    labels: tuple[str, ...] = ()
    """Names of a classifier's classes."""

    def __contains__(self, task: Task) -> bool:
        return task in self.names

    def check(self, task: Task, dimensions: int | None = None, model: str = "this model") -> None:
        """Raise UnsupportedTask, or InvalidParameter if embeddings cannot have these dimensions. model: its name in
        errors."""
        if task not in self.names:
            raise UnsupportedTask(task, list(self.names), model)
        if dimensions is None:
            return
        if task not in EMBEDS:
            raise InvalidParameter("dimensions", dimensions, f"left out, because {task!r} makes no embeddings")
        sizes = self.matryoshka_dimensions
        if sizes and dimensions not in sizes:
            limit = f"one of the sizes that the model was trained for ({', '.join(map(str, sizes))})"
            raise InvalidParameter("dimensions", dimensions, limit)
        if dimensions > self.embedding_size:
            limit = f"at most {self.embedding_size}, the size of this embedding"
            raise InvalidParameter("dimensions", dimensions, limit)
