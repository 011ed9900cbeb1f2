"""Examples of all records that cross a border between two versions, and the types of a version of which only the forms
are left.

`python -m tests.cluster.versions.examples` writes those of this version to records/. Run it when a version is released:
the tests then compare the next one with it. Before, it would hide what breaks.
"""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from cluster.versions.borders import IN_JSON, forms, kinds_by_border
from cluster.versions.record_form import Forms, RecordForm, name_of

RECORDS = Path(__file__).parent / "records"
FORMS = "forms"  # name of the file with all forms; the others have the examples of one border each
PLAIN = {
    "bool": True, "int": 2, "float": 0.5, "str": "text", "bytes": b"\x01\x02", "Any": "anything", "Raw": [1, "raw"],
    "datetime": datetime(2026, 11, 30, 12, tzinfo=UTC),
}  # fmt: skip
TYPES = {"Any": Any, "Raw": msgspec.Raw, "Literal": Literal, "datetime": datetime}
OF_RECORDS = {"StructuredOutputsParams": {"regex": ".*"}}
"""Fields of records that refuse some others beside these."""
OF_FIELDS = {"PoolingParams.score_token_ids": [2, 3]}
"""Values of fields that refuse others."""


def codec(name: str) -> Any:
    """The format of a record that crosses a border by itself."""
    return msgspec.json if name in IN_JSON else msgspec.msgpack


class Sampler:
    """Makes a value of each type, in which optional fields are there too."""

    def __init__(self, found: Forms):
        self._forms = found

    def encoded(self, name: str) -> bytes:
        return codec(name).encode(self.record(name))

    def record(self, name: str) -> Any:
        form = self._forms[name]
        values = OF_RECORDS.get(name) or {
            field.name: OF_FIELDS.get(f"{name}.{field.name}") or self._other_than(field.default, field.type)
            for field in form.read_fields()
        }
        tag = {} if form.tag is None else {form.tag_field: form.tag}
        return [*tag.values(), *values.values()] if form.is_array else {**tag, **values}

    def _other_than(self, default: str | None, told: str) -> Any:
        """A value that is not the default, which may be left out."""
        value = self._value(ast.parse(told, mode="eval").body)
        return (not value) if isinstance(value, bool) and repr(value) == default else value

    def _value(self, told: ast.expr) -> Any:
        match told:
            case ast.BinOp(left=left, right=right):
                return self._value(right if isinstance(left, ast.Constant) else left)
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.record(name) if name in self._forms else PLAIN[name]
            case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
                return ast.literal_eval(choices.elts[-1] if isinstance(choices, ast.Tuple) else choices)
            case ast.Subscript(value=ast.Name(id="list"), slice=item):
                return [self._value(item)]
            case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, value])):
                return {self._value(key): self._value(value)}
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
                return [self._value(item) for item in items if ast.unparse(item) != "..."]
        raise TypeError(ast.unparse(told))


def kind_of(found: Forms) -> Callable[[str], Any]:
    """Return a function that makes the class of a record from its form, as the version that had it would read it."""
    made: dict[str, Any] = {}

    def kind(name: str) -> Any:
        if name not in made:
            form = found[name]
            fields = [(each.name, resolved(each.type), default(each.default)) for each in form.read_fields()]
            made[name] = msgspec.defstruct(
                "".join(filter(str.isalnum, name)),
                [(name, kind, msgspec.field(**given)) for name, kind, given in fields],
                kw_only=True,
                array_like=form.is_array,
                tag=form.tag,
                tag_field=form.tag_field,
                omit_defaults=form.omits_defaults,
                forbid_unknown_fields=form.is_closed,
            )
        return made[name]

    def resolved(told: str) -> Any:
        inside = [node.id for node in ast.walk(ast.parse(told, mode="eval")) if isinstance(node, ast.Name)]
        return eval(told, {**TYPES, **{name: kind(name) for name in inside if name in found}})

    return kind


def default(told: str | None) -> dict[str, Any]:
    """The default of a field, as arguments of msgspec.field; None for one that is not told."""
    if told is None:
        return {}
    try:
        value = ast.literal_eval(told)
    except (ValueError, SyntaxError):
        value = None
    return {"default_factory": value.copy} if isinstance(value, list | dict) else {"default": value}


def read_forms() -> Forms:
    return msgspec.json.decode((RECORDS / f"{FORMS}.json").read_bytes(), type=dict[str, RecordForm])


def read_examples() -> dict[str, bytes]:
    """The bytes of each record that crossed a border by itself, by name."""
    files = [file for file in sorted(RECORDS.glob("*.json")) if file.stem != FORMS]
    return {name: base64.b64decode(text) for file in files for name, text in json.loads(file.read_text()).items()}


def write() -> None:
    RECORDS.mkdir(exist_ok=True)
    for file in RECORDS.glob("*.json"):
        file.unlink()
    found = forms()
    _write(FORMS, msgspec.to_builtins(found))
    sampler = Sampler(found)
    for border, kinds in kinds_by_border().items():
        names = sorted(map(name_of, kinds))
        _write(border, {name: base64.b64encode(sampler.encoded(name)).decode() for name in names})


def _write(name: str, content: object) -> None:
    (RECORDS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    write()
