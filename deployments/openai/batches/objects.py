"""Request and response bodies of the Files and Batch API, with OpenAI's field names."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from deployments.http.body import RequestBody
from deployments.openai.batches.files import MAX_AGE_S, File
from deployments.openai.batches.records import T

HOUR_S = 3600
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


class ExpiresAfter(BaseModel):
    """When a file is deleted."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=HOUR_S, le=MAX_AGE_S)


class UploadForm(BaseModel):
    """POST /v1/files, as multipart/form-data. `expires_after` is sent as two fields, such as
    `expires_after[seconds]`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    file: Annotated[Any, Field(json_schema_extra={"type": "string", "format": "binary"})]
    """One JSON object per line."""
    purpose: Literal["batch"]
    expires_after: ExpiresAfter = ExpiresAfter(anchor="created_at", seconds=MAX_AGE_S)


class FileQuery(BaseModel):
    """GET /v1/files"""

    purpose: str | None = None
    after: str | None = None
    """The last id of the page before."""
    limit: int = Field(default=10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    """Sort order, by the time of creation."""


class DeletedFile(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class Page(msgspec.Struct, Generic[T]):
    """Objects of one page of a list, and whether there are more."""

    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"

    @classmethod
    def of(cls, data: list[T], has_more: bool) -> Self:
        return cls(data, has_more, data[0].id if data else None, data[-1].id if data else None)


class FileList(Page[File]):
    """The response of GET /v1/files."""


class BatchBody(RequestBody):
    """POST /v1/batches"""

    input_file_id: str = Field(max_length=100)
    endpoint: Endpoint
    completion_window: str = Field(pattern=r"^[1-9][0-9]{0,2}h$")
    """`24h`, as in OpenAI's API, or any number of hours. Requests unanswered by then get the error `batch_expired`."""
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16
    )
    output_expires_after: ExpiresAfter = ExpiresAfter(anchor="created_at", seconds=MAX_AGE_S)
    """When the output file and the error file expire."""


class BatchError(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: Endpoint
    model: str | None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_after: dict[str, str | int]
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchQuery(BaseModel):
    """GET /v1/batches"""

    after: str | None = None
    """The last id of the page before."""
    limit: int = Field(default=20, ge=1, le=100)


class BatchList(Page[Batch]):
    """The response of GET /v1/batches."""
