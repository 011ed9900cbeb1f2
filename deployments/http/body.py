"""Base classes of request bodies, and functions that parse them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, TypeVar

import pydantic
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from deployments.http.validation import ForeignFields, UnknownFields, validation_error
from engine.errors import RequestError

UNKNOWN_FIELDS = "unknown_fields"  # key in pydantic's validation context
MAX_FIELDS = 200
MAX_NUMBER_CHARS = 32


def _number(value: Any) -> Any:
    """Convert a number written as text, as some clients send it; return any other value unchanged."""
    if isinstance(value, str) and len(value) <= MAX_NUMBER_CHARS:
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
    return value


def _whole(value: Any) -> Any:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


Number = Annotated[float, BeforeValidator(_number)]
"""A float field, which also accepts "0.5"."""
Whole = Annotated[int, BeforeValidator(_whole)]
"""An int field, which also accepts 1.0 and "1"."""


class StrictModel(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class RequestBody(BaseModel):
    """A JSON object. null means the same as absent: the default of the model or server."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    foreign_fields: ClassVar[ForeignFields] = ForeignFields()

    model: str | None = Field(default=None, max_length=1024)
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _sort_out(cls, body: Any, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(body, dict):
            return validate(body)
        if len(body) > MAX_FIELDS:  # else pydantic would list every unknown one
            raise RequestError(f"the body has {len(body)} fields; no route has more than {MAX_FIELDS}")
        given = {name: value for name, value in body.items() if value is not None}
        unknown_fields = (info.context or {}).get(UNKNOWN_FIELDS, "refuse")
        kept, ignored = cls.foreign_fields.drop(given, cls.model_fields, unknown_fields)
        parsed = validate(kept)
        parsed._ignored = ignored
        return parsed

    @property
    def ignored(self) -> list[str]:
        """Fields that have no effect with any model; the client gets a warning about them."""
        return self._ignored

    def check(self) -> None:
        """Raise RequestError for fields that contradict each other."""


class UsageOptions(StrictModel):
    """OpenRouter's field: whether the usage includes what the request has cost."""

    include: bool = False


class EngineBody(RequestBody):
    """Fields of all requests that engines serve."""

    usage: UsageOptions | None = None
    user: str | None = Field(default=None, max_length=1024)
    """User whose fair share of the server the request uses, if the server has no API keys."""
    safety_identifier: str | None = Field(default=None, max_length=1024)
    """Used like `user`, if that is not given."""
    request_id: str | None = None
    """Part of the response's id; replaces the header X-Request-Id, which Serve gives every request."""
    session_id: str | None = None
    """Used like the header X-Session-Id, if that is not given."""

    @property
    def reports_cost(self) -> bool:
        return self.usage is not None and self.usage.include


Body = TypeVar("Body", bound=RequestBody)
Fields = TypeVar("Fields", bound=BaseModel)


def validated(kind: type[Fields], given: object) -> Fields:
    """Return an object of decoded values: a query, a form, or a part of a body. Raises RequestError that names the
    field, its value and the expected values."""
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        raise validation_error(error, ForeignFields()) from None


def parse(kind: type[Body], raw: bytes, unknown_fields: UnknownFields = "refuse") -> Body:
    """Return the body parsed from JSON. Raises RequestError that names the field, its value and the expected values."""
    try:
        body = kind.model_validate_json(raw, context={UNKNOWN_FIELDS: unknown_fields})
    except pydantic.ValidationError as error:
        raise validation_error(error, kind.foreign_fields) from None
    body.check()
    return body
