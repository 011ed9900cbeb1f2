"""The error of an image that cannot be read."""

from __future__ import annotations

from engine.errors import InvalidParameter


class InvalidImage(InvalidParameter):
    """An image of the request cannot be read, or exceeds a limit. `field` is the path of the image in the request."""

    def __init__(self, field: str, value: object, limit: str):
        super().__init__(field, value, limit)
        self.param = field.partition("[")[0]
