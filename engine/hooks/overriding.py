"""Calls only those of many objects that have something to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def overriding(objects: Iterable[object], method: Callable[Concatenate[Any, P], T]) -> tuple[Callable[P, T], ...]:
    """Return a method of a base class, bound to those objects whose classes override it."""
    return tuple(getattr(each, method.__name__) for each in objects if overrides(type(each), method))


def overrides(kind: type, method: Callable[..., Any]) -> bool:
    """Return whether a class has its own form of a method of its base class."""
    return getattr(kind, method.__name__) is not method
