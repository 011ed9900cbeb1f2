"""Objects that have the same hooks, most of which most of them leave out: they are found by class, and only those are
called that have something to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
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


def overriding(objects: Iterable[object], method: Callable[Concatenate[Any, P], T]) -> tuple[Callable[P, T], ...]:
    """Return a method of a base class, bound to those objects whose classes override it."""
    return tuple(getattr(each, method.__name__) for each in objects if overrides(type(each), method))


def overrides(kind: type, method: Callable[..., Any]) -> bool:
    """Return whether a class has its own form of a method of its base class."""
    return getattr(kind, method.__name__) is not method
