"""Request bodies: OpenAI's field names for embeddings, Jina's and Cohere's for rankings, with vLLM's additions."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from pydantic import Field

from deployments.http.body import EngineBody, StrictModel
from deployments.http.validation import ForeignFields
from engine.errors import InvalidParameter, RequestError
from engine.wire.parts.pooling import PoolingParams

INT32 = 2**31 - 1
MAX_INPUTS = 2048  # OpenAI's limit
MAX_PAIR_CHARACTERS = 2**26
"""Limit for all queries and documents together; a query counts once per document, because it is read again."""
FOREIGN_FIELDS = ForeignFields(
    ignored={
        "max_chunks_per_doc": "documents are never split into chunks",
        "mm_processor_kwargs": "inputs can only be text",
    },
    refused={
        "embed_dtype": "only float32 is supported",
        "endianness": "only little-endian numbers are supported",
        "max_tokens_per_doc": "use truncate_prompt_tokens",
        "messages": "put the text into input",
        "normalize": "use use_activation",
        "padding": "texts are never padded",
        "rank_fields": "documents can only be texts",
        "truncation_side": "longer texts are always cut at the end",
    },
    neutral={
        "embed_dtype": ["float32"],
        "endianness": ["little", "native"],
        "padding": ["do_not_pad"],
        "truncation_side": ["right"],
    },
)

T = TypeVar("T")
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Inputs = Annotated[list[T], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class PoolingBody(EngineBody):
    """Fields that all pooling requests share."""

    foreign_fields = FOREIGN_FIELDS

    truncate_prompt_tokens: int | None = Field(default=None, le=INT32)
    """Length to cut longer texts to, in tokens; -1 for the model's maximum."""
    use_activation: bool | None = None
    """Whether to scale embeddings to length 1, and to make scores and the numbers of classes probabilities."""
    priority: int = Field(default=0, ge=-INT32, le=INT32)
    """Smaller runs first, if the engine's `scheduling_policy` is `priority`."""
    cache_salt: str = Field(default="", max_length=1024)

    def pooling_params(self) -> PoolingParams:
        """Return the pooling parameters. Raises InvalidParameter."""
        return PoolingParams(truncate_prompt_tokens=self.truncate_prompt_tokens, use_activation=self.use_activation)


class TextsBody(PoolingBody):
    """Fields of requests with texts, each of which is computed by itself."""

    input: str | TokenIds | Inputs[str] | Inputs[TokenIds]
    """A text, token ids, or a list of either."""
    prompt_name: str | None = Field(default=None, max_length=1024)
    """Name of the model's prompt to put in front of each text."""
    add_special_tokens: bool = True

    def inputs(self) -> list[str | list[int]]:
        """Return one or more non-empty texts or lists of token ids. Raises InvalidParameter."""
        inputs: list[str | list[int]]
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            inputs = [self.input]
        else:
            inputs = self.input  # type: ignore[assignment]
        if not inputs or not all(inputs):
            raise InvalidParameter("input", self.input, "a text, or token ids, that are not empty")
        return inputs


class ClassifyBody(TextsBody):
    """POST /classify"""


class EmbeddingBody(TextsBody):
    """POST /v1/embeddings"""

    encoding_format: Literal["float", "base64"] = "float"
    """`base64` returns the numbers' bytes: float32, little endian."""
    dimensions: int | None = Field(default=None, le=INT32)
    """Size to cut embeddings to, for models trained for it."""

    def pooling_params(self) -> PoolingParams:
        return msgspec.structs.replace(super().pooling_params(), dimensions=self.dimensions)


class VectorBody(EmbeddingBody):
    """POST /pooling"""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    """What to compute: numbers of each text, or of each of its tokens; by default the first that the model can do."""


class TextDocument(StrictModel):
    text: str


class PairsBody(PoolingBody):
    """Fields of requests that compare documents with queries."""

    instruction: str | None = None
    """Instruction for a generative reranker, which replaces its default."""


class ScoreBody(PairsBody):
    """POST /v1/score"""

    queries: str | Inputs[str] | None = None
    documents: str | Inputs[str] | None = None
    """As many documents as queries, or any number for a single query."""
    text_1: str | Inputs[str] | None = None
    """vLLM's older name for `queries`."""
    text_2: str | Inputs[str] | None = None
    """vLLM's older name for `documents`."""

    def check(self) -> None:
        super().check()
        older = self.queries is None and self.text_1 is not None
        given = {"queries", "documents", "text_1", "text_2"} & self.model_fields_set
        for name in ("text_1", "text_2") if older else ("queries", "documents"):
            if getattr(self, name) is None:
                raise RequestError(f"{name} is required", name)
            given.discard(name)
        if given:
            name = min(given)
            raise RequestError(f"{name} must be left out with queries and documents", name)
        queries, documents = self.texts()
        if len(queries) not in (1, len(documents)):
            limit = f"a list of as many as there are documents ({len(documents)}), or one"
            raise InvalidParameter("text_1" if older else "queries", len(queries), limit)

    def texts(self) -> tuple[list[str], list[str]]:
        """Return the queries (one, or as many as documents) and the documents."""
        queries = self.text_1 if self.queries is None else self.queries
        documents = self.text_2 if self.documents is None else self.documents
        return _as_list(queries), _as_list(documents)


class RerankBody(PairsBody):
    """POST /v1/rerank"""

    query: str
    documents: Inputs[str | TextDocument]
    top_n: int = Field(default=0, ge=0)
    """Number of documents to return, best first; 0 for all."""
    return_documents: bool = True
    """Whether the response contains the texts of the documents."""

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


def _as_list(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []
