"""Reads fields of config.json, which anybody may have written. Each is checked as it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import ModelFolderError

MAX_SHOWN = 100  # characters of a value
KINDS = ".kinds"
"""The module whose `exceeded` knows the limits of all fields."""


class Unsupported(Exception):
    """A field of config.json has a value that this engine does not support."""

    def __init__(self, field: str, value: object, limit: str = ""):
        super().__init__(field, value, limit)
        self.field, self.value, self.limit = field, value, limit

    def __str__(self) -> str:
        limit = f": must be {self.limit}" if self.limit else ""
        shown = repr(self.value)
        shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"
        return f"{self.field} = {shown} is not supported{limit}"


@contextmanager
def reading(folder: Path, name: str) -> Iterator[None]:
    """Raise ModelFolderError with the name of the file that is read, for a field of it that is missing or wrong."""
    try:
        yield
    except KeyError as error:
        problem = f"{name} has no {error.args[0]!r}"
    except Unsupported as error:
        problem = f"{name}: {error}"
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError) as error:
        problem = f"{name} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        return
    raise ModelFolderError(str(folder), problem)


class Fields(dict[str, Any]):
    """Fields of config.json, or of an object in it. A value that cannot be right is refused as it is read.

    `|` joins them with fields under other names, or with those of a family, which are not checked.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", whole: Fields | None = None):
        """path: names of the objects that contain it, each with a dot. whole: the fields that these replace."""
        super().__init__(values)
        self.path = path
        self.own: frozenset[str] = frozenset(values) if whole is None else whole.own  #: those that are in the file
        self.used: set[str] = set() if whole is None else whole.used  #: those of `own` that were read

    def __getitem__(self, key: str) -> Any:
        return self._read(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._read(key, super().__getitem__(key)) if key in self else default

    def __or__(self, other: Mapping[str, Any]) -> Fields:  # type: ignore[override]
        joined = Fields(super().__or__(dict(other)), self.path, self)
        joined.own = self.own - other.keys()
        return joined

    def __ror__(self, other: dict[str, Any]) -> Fields:  # type: ignore[override]
        return Fields(super().__ror__(other), self.path, self)

    def pick(self, keep: Any) -> Fields:
        """Return the fields whose names `keep` accepts, without reading them."""
        kept = Fields({key: value for key, value in self.items() if keep(key)}, self.path, self)
        kept.own = self.own & kept.keys()
        return kept

    def _read(self, key: str, value: Any) -> Any:
        if key in self.own:
            self.used.add(key)
            if limit := import_module(KINDS, __package__).exceeded(key, value):
                raise Unsupported(self.path + key, value, limit)
        return Fields(value, f"{self.path}{key}.") if type(value) is dict else value


def one_of(field: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise Unsupported(field, value, " or ".join(map(str, allowed)))
    return value
