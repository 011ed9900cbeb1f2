"""Objects that are found by their classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K")


class ByClass(Generic[T]):
    """Objects, at most one of each class that is asked for."""

    def __init__(self, objects: Iterable[T] = ()):
        self.all = tuple(objects)

    def get(self, kind: type[K]) -> K | None:
        """Return the object of this class, or None."""
        return next((each for each in self.all if isinstance(each, kind)), None)

    def __getitem__(self, kind: type[K]) -> K:
        if (found := self.get(kind)) is None:
            raise KeyError(kind.__name__)
        return found
