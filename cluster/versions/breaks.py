"""Rules by which two versions read each other's records: fields are only appended, and only with a default."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from cluster.versions.record_form import FieldForm, Forms


def find_breaks(old: Forms, new: Forms, roots: Iterable[str]) -> list[str]:
    """Return what one of two versions could not read of the other, a line each. roots: names of the records that the
    old version sends or stores; others are parts of these."""
    comparison = _Comparison(old, new)
    for name in roots:
        if name in new:
            comparison.record(name, name)
        else:
            comparison.lines.append(f"{name} was removed")
    return comparison.lines


class _Comparison:
    def __init__(self, old: Forms, new: Forms):
        self.lines: list[str] = []
        self._old, self._new = old, new
        self._seen: set[tuple[str, str]] = set()

    def record(self, was: str, now: str) -> None:
        """Compare two records. The name of one that is only a part of others does not matter."""
        if (was, now) in self._seen:
            return
        self._seen.add((was, now))
        old, new = self._old[was], self._new[now]
        if old.is_array != new.is_array:
            self.lines.append(f"{now} is {'an array' if new.is_array else 'a map'} now")
            return
        if (old.tag, old.tag_field) != (new.tag, new.tag_field):
            self.lines.append(f"the tag of {now} was {old.tag!r} and is {new.tag!r}")
        if old.part != new.part:
            self.lines.append(f"{now} was carried as {old.part} and is carried as {new.part}")
        if new.is_closed:
            self.lines.append(f"{now} refuses fields that it does not know, and so those of the next version")
        self._fields(was, now)

    def _fields(self, was: str, now: str) -> None:
        old, new = self._old[was], self._new[now]
        before, after = old.read_fields(), new.read_fields()
        places = {field.name: i for i, field in enumerate(after)}
        for i, field in enumerate(before):
            place = places.get(field.name)
            if place is None:
                self.lines.append(f"{now}.{field.name} was removed, or has another name")
            elif new.is_array and place != i:
                self.lines.append(f"{now}.{field.name} was item {i} of the array and is item {place}")
            else:
                self._field(f"{now}.{field.name}", field, after[place], old.omits_defaults, new.omits_defaults)
        known = {field.name for field in before}
        for field in after:
            if field.name not in known and field.default is None:
                self.lines.append(f"{now}.{field.name} is new and needs a default, since the version before lacks it")

    def _field(self, place: str, was: FieldForm, now: FieldForm, omitted: bool, omits: bool) -> None:
        """omitted, omits: whether the old and the new version leave out fields with their default."""
        if not self._is_readable(ast.parse(was.type, mode="eval").body, ast.parse(now.type, mode="eval").body):
            self.lines.append(f"{place} was {was.type} and is {now.type}")
        if was.default == now.default:
            return
        if now.default is None:
            self.lines.append(f"{place} has no default any more, and may be missing")
        elif was.default is None and omits:
            self.lines.append(f"{place} may be missing now, and the version before needs it")
        elif was.default is not None and (omitted or omits):
            self.lines.append(f"{place} may be left out: this meant {was.default}, and means {now.default}")

    def _is_readable(self, was: ast.expr, now: ast.expr) -> bool:
        """Compare two types, and the records in them. A field with one of several records that have tags may have more
        of them later: whoever does not know a tag drops the message, and counts it."""
        before, after = _alternatives(was), _alternatives(now)
        tagged, known = _by_tag(before, self._old), _by_tag(after, self._new)
        if not tagged.keys() <= known.keys():
            return False
        for tag, name in tagged.items():
            self.record(name, known[tag])
        before = [one for one in before if not _is_in(tagged, one)]
        after = [one for one in after if not _is_in(known, one)]
        return len(before) == len(after) and all(map(self._is_alike, before, after))

    def _is_alike(self, was: ast.AST, now: ast.AST) -> bool:
        if isinstance(was, ast.Name) and isinstance(now, ast.Name):
            if was.id in self._old and now.id in self._new:
                self.record(was.id, now.id)
                return True
            return was.id == now.id
        if isinstance(was, ast.Constant) and isinstance(now, ast.Constant):
            return bool(was.value == now.value)
        before, after = list(ast.iter_child_nodes(was)), list(ast.iter_child_nodes(now))
        return type(was) is type(now) and len(before) == len(after) and all(map(self._is_alike, before, after))


def _alternatives(told: ast.expr) -> list[ast.expr]:
    """Return the types of which a value has one."""
    if isinstance(told, ast.BinOp):
        return [*_alternatives(told.left), *_alternatives(told.right)]
    return [told]


def _by_tag(types: list[ast.expr], forms: Forms) -> dict[str | int | None, str]:
    """Return the names of the records with a tag."""
    names = [one.id for one in types if isinstance(one, ast.Name) and one.id in forms]
    return {forms[name].tag: name for name in names if forms[name].tag is not None}


def _is_in(tagged: dict[str | int | None, str], one: ast.expr) -> bool:
    return isinstance(one, ast.Name) and one.id in tagged.values()
