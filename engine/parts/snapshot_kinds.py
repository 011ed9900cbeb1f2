"""What a feature adds to snapshots of a scheduler: its classes, and what a snapshot leaves out of them.

A tape begins with a snapshot, so no text is in one (tape/snapshot.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

ORDINARY = 0
"""Stands for any token that does not end a request."""
NO_TOKEN = -4
"""Stands for a drafted token that no vocabulary has."""


class Zeros(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """A list of zeros: tokens that are not said."""

    count: int
    packed: bool = False
    """Whether they are an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotKinds:
    """The classes of one feature that may be in a snapshot. The `snapshot_kinds.py` of its folder has them as KINDS."""

    objects: tuple[type, ...] = ()
    """Those whose objects refer to others, and are referred to."""
    messages: tuple[type, ...] = ()
    """Those that are written whole, as on a wire."""
    rows: tuple[type, ...] = ()
    """Named tuples."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Objects that each process has, by name."""
    methods: tuple[tuple[type, str], ...] = ()
    """Methods that are kept bound, besides the hooks of a part."""
    changes: Mapping[type, Callable[[Any], dict[str, Any]]] = field(default_factory=dict)
    """Return the fields of an object of a class that are written with other values."""
    stands_for: Mapping[type, Callable[[Any], Any]] = field(default_factory=dict)
    """Return what is written instead of an object of a class."""
    unsaid: tuple[str, ...] = ()
    """Keys of Request.of that are left out."""
