"""The request bodies that an application reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import new_class
from typing import ClassVar

from starlette.requests import Request

from deployments.http.body import Body, RequestBody, parse
from deployments.http.json_body import read_json
from deployments.http.validation import UnknownFields


class PartFields(RequestBody):
    """Fields that a part adds to bodies. Their classes inherit from it, so `check` has to call that of `super()`."""

    kinds: ClassVar[tuple[type[RequestBody], ...]]
    """The bodies that get the fields."""


class Bodies:
    """Makes the classes of bodies, each with the fields of parts, and reads bodies."""

    def __init__(self, unknown_fields: UnknownFields, fields: Sequence[type[PartFields]]):
        self._unknown_fields, self._fields = unknown_fields, fields

    def kind(self, base: type[Body]) -> type[Body]:
        """Return the class of these bodies with the fields of parts."""
        return _with_fields(base, tuple(fields for fields in self._fields if issubclass(base, fields.kinds)))

    def parse(self, base: type[Body], raw: bytes) -> Body:
        """Return a body parsed from JSON. Raises RequestError that names the field, its value and the expected
        values."""
        return parse(self.kind(base), raw, self._unknown_fields)

    async def read(self, request: Request, base: type[Body]) -> Body:
        """Return the parsed body of a request. Raises RequestError, UnsupportedMediaType, or BodyTooLarge while
        reading."""
        return self.parse(base, await read_json(request))


@cache
def _with_fields(base: type[Body], added: tuple[type[PartFields], ...]) -> type[Body]:
    """Return a body's class with fields: to make it takes pydantic 30 ms."""
    named = {"__doc__": base.__doc__, "__module__": base.__module__}
    return new_class(base.__name__, (*added, base), exec_body=lambda body: body.update(named))
