"""Forms of records as data, so that another version can compare them with its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import NODEFAULT, inspect

from engine.wire.part_record import PartRecord

MAX_DEFAULT = 60  # characters; a longer default is not told


class FieldForm(NamedTuple):
    name: str
    type: str
    default: str | None
    """None for a field that a record must have."""

    @classmethod
    def read(cls, told: str) -> FieldForm:
        name, _, rest = told.partition(": ")
        kind, equals, default = rest.partition(" = ")
        return cls(name, kind, default if equals else None)

    def __str__(self) -> str:
        return f"{self.name}: {self.type}" + ("" if self.default is None else f" = {self.default}")


class RecordForm(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the bytes of one kind of record look like."""

    fields: list[str]
    """In order, as Python declares them: `name: type`, followed by ` = default` if bytes may lack the field. Types are
    msgspec's; the name of a record stands for its form."""
    is_array: bool = False
    """Whether it is the values of its fields in order, instead of a map by name."""
    tag: str | int | None = None
    """What tells it apart from others where several kinds may come."""
    tag_field: str | None = None
    omits_defaults: bool = False
    """Whether fields with their default are left out."""
    is_closed: bool = False
    """Whether a field that is not known is refused."""
    part: str | None = None
    """For a PartRecord, how messages name it: by its part, after `hints.` if those without the part ignore it."""

    def read_fields(self) -> list[FieldForm]:
        return [FieldForm.read(told) for told in self.fields]


Forms = dict[str, RecordForm]
"""By the names of the records' classes."""


def forms_of(kinds: Iterable[Any]) -> Forms:
    """Return the forms of these kinds of records, and of all in their fields. Raises TypeError for a type that has no
    form, and for two classes of one name."""
    forms = _Forms()
    for kind in kinds:
        forms.told(inspect.type_info(kind))
    return dict(sorted(forms.found.items()))


class _Forms:
    def __init__(self) -> None:
        self.found: Forms = {}
        self._classes: dict[str, Any] = {}

    def told(self, kind: inspect.Type) -> str:
        """Return what a field says of its type."""
        match kind:
            case inspect.StructType() | inspect.DataclassType():
                return self._record(kind)
            case inspect.ListType(item_type=item):
                return f"list[{self.told(item)}]"
            case inspect.VarTupleType(item_type=item):
                return f"tuple[{self.told(item)}, ...]"
            case inspect.TupleType(item_types=items):
                return f"tuple[{', '.join(map(self.told, items))}]"
            case inspect.NamedTupleType(fields=fields):
                return f"tuple[{', '.join(self.told(field.type) for field in fields)}]"
            case inspect.DictType(key_type=key, value_type=value):
                return f"dict[{self.told(key)}, {self.told(value)}]"
            case inspect.UnionType(types=types):
                return " | ".join(sorted(map(self.told, types)))
            case inspect.LiteralType(values=values):
                return f"Literal[{', '.join(map(repr, values))}]"
            case _ if (name := PLAIN.get(type(kind))) is not None:
                return name
        raise TypeError(f"{kind} has no form")

    def _record(self, kind: inspect.StructType | inspect.DataclassType) -> str:
        name = name_of(kind.cls)
        if self._classes.setdefault(name, kind.cls) != kind.cls:
            raise TypeError(f"two records have the name {name}: {self._classes[name]!r} and {kind.cls!r}")
        if name not in self.found:
            self.found[name] = RecordForm(fields=[])  # while its fields are looked at, which may have it again
            fields = [str(FieldForm(each.encode_name, self.told(each.type), _default(each))) for each in kind.fields]
            if isinstance(kind, inspect.DataclassType):
                self.found[name] = RecordForm(fields=fields)
            else:
                self.found[name] = RecordForm(
                    fields=fields,
                    is_array=kind.array_like,
                    tag=kind.tag,
                    tag_field=kind.tag_field,
                    omits_defaults=_config(kind.cls).omit_defaults,
                    is_closed=kind.forbid_unknown_fields,
                    part=_part(kind.cls),
                )
        return name


PLAIN = {
    inspect.NoneType: "None",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
    inspect.DateTimeType: "datetime",
    inspect.AnyType: "Any",
    inspect.RawType: "Raw",
}


def name_of(kind: Any) -> str:
    """Return the name of a kind of records: that of its class, with the classes that a generic one is given."""
    given = getattr(kind, "__args__", ())
    name: str = getattr(kind, "__origin__", kind).__name__
    return f"{name}[{', '.join(map(name_of, given))}]" if given else name


def _config(kind: Any) -> Any:
    return getattr(kind, "__origin__", kind).__struct_config__


def _part(kind: Any) -> str | None:
    if not (isinstance(kind, type) and issubclass(kind, PartRecord)):
        return None
    return f"hints.{kind.part}" if kind.is_hint else kind.part


def _default(field: inspect.Field) -> str | None:
    if field.required:
        return None
    if field.default_factory is not NODEFAULT:
        value = field.default_factory()
    elif field.default is NODEFAULT:
        return "UNSET"
    else:
        value = field.default
    told = repr(value)
    return told if len(told) <= MAX_DEFAULT else "..."
