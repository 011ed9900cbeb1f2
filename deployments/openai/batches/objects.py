"""Bodies of requests and responses of the Files and Batch API, with OpenAI's field names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from deployments.openai.batches.files import MAX_AGE_S, File

HOUR_S = 3600


class ExpiresAfter(BaseModel):
    """When a file is deleted."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=HOUR_S, le=MAX_AGE_S)


class UploadForm(BaseModel):
    """POST /v1/files, as multipart/form-data; `expires_after` comes as two fields, for instance
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
    """By the time of creation."""


class DeletedFile(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class FileList(msgspec.Struct):
    data: list[File]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"

    @classmethod
    def of(cls, data: list[File], has_more: bool) -> Self:
        return cls(data, has_more, data[0].id if data else None, data[-1].id if data else None)
