"""Places in a JSON schema, and the references between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from referencing import Anchor, Registry, Specification
from referencing.jsonschema import DRAFT202012, specification_with

if TYPE_CHECKING:
    from referencing._core import Resolver

_CONDITIONS = ("if", "then", "else")
_NEWER: dict[str, tuple[str, ...]] = {
    "draft-03": (*_CONDITIONS, "contains", "propertyNames"),
    "draft-04": (*_CONDITIONS, "contains", "propertyNames"),
    "draft-06": _CONDITIONS,
    "draft-07": (),
}
"""Drafts in which keywords next to `$ref` have no effect, each with keywords that it does not know, so that they assert
nothing. Others that are newer are read."""
_MAX_SHOWN = 80


def _schemas_in(contents: Any) -> Iterator[Any]:
    for found in DRAFT202012.subresources_of(contents) if isinstance(contents, dict) else ():
        yield from found if isinstance(found, list) else [found]


def _id_of(contents: Any) -> str | None:
    return DRAFT202012.id_of(contents) if isinstance(contents, dict) else None


def _anchors_in(contents: Any) -> Iterator[Any]:
    if isinstance(contents, dict):
        yield from DRAFT202012.anchors_in(contents)
        identifier = _id_of(contents)
        if isinstance(identifier, str) and identifier.startswith("#"):
            resource = _ANY_DRAFT.create_resource(contents)
            yield Anchor(identifier[1:], resource)  # type: ignore[call-arg]  # mypy does not see its fields


# that of draft 2020-12, and what came before it: `items` may be a list, and `$id` may be an anchor
_ANY_DRAFT: Specification[Any] = Specification(  # type: ignore[call-arg]  # mypy does not see its fields
    name="any draft",
    id_of=lambda contents: None if str(found := _id_of(contents)).startswith("#") else found,
    subresources_of=_schemas_in,
    anchors_in=lambda specification, contents: [*_anchors_in(contents)],
    maybe_in_subresource=lambda segments, resolver, subresource: (
        DRAFT202012.maybe_in_subresource(segments, resolver, subresource)
        if isinstance(subresource.contents, dict)
        else resolver
    ),
)


class SchemaError(ValueError):
    """A JSON schema that cannot be enforced; the message is the reason, and names the place."""


@dataclass(frozen=True, slots=True)
class Subschema:
    """A schema inside a document."""

    schema: Any
    path: str
    """JSON pointer to the schema, as written in the document; for messages."""
    resolver: Resolver[Any]
    draft: str
    """The document's draft if it is one of those above, else empty."""
    found: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    """Results of references so far, by the identity of the resolver and the reference."""

    @classmethod
    def root(cls, schema: dict[str, Any]) -> Subschema:
        """Raises SchemaError."""
        dialect = schema.get("$schema")
        dialect = dialect if isinstance(dialect, str) else ""
        specification = specification_with(dialect, default=_ANY_DRAFT)
        try:
            resolver = Registry().resolver_with_root(specification.create_resource(schema))
        except Exception as error:  # noqa: BLE001 - as in `target`
            raise SchemaError(f"$id at # must be a URI ({_short(error)})") from None
        return cls(schema, "#", resolver, next((draft for draft in _NEWER if draft in dialect), ""))

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords that have an effect; empty if the schema is true or false. Raises SchemaError."""
        if isinstance(self.schema, bool):
            return {}
        if not isinstance(self.schema, dict):
            raise self.error("a JSON schema")
        if self.draft and "$ref" in self.schema:
            return {"$ref": self.schema["$ref"]}
        unknown = _NEWER.get(self.draft, ())
        if not unknown and not any(value is None for value in self.schema.values()):
            return self.schema
        given = self.schema.items()
        return {key: value for key, value in given if (value is not None or key == "const") and key not in unknown}

    def child(self, *keys: str | int) -> Subschema:
        schema, path = self.schema, self.path
        for key in keys:
            schema, path = schema[key], f"{path}/{key}"
        return self._at(schema, path, self.resolver)

    def children(self, key: str) -> Iterator[tuple[Any, Subschema]]:
        """Yield the schemas in a list or an object of schemas, each with its index or name. Raises SchemaError."""
        value = self.schema[key]
        if not isinstance(value, list | dict):
            raise self.error("a list or an object of schemas", key)
        for inner in value if isinstance(value, dict) else range(len(value)):
            yield inner, self.child(key, inner)

    def target(self, keyword: str) -> Subschema:
        """Return the place that a reference names. Raises SchemaError."""
        reference = self.schema[keyword]
        if not isinstance(reference, str):
            raise self.error("a text", keyword)
        reference = "#" if reference == "#/" else reference  # as some generators of schemas name the root
        key = (id(self.resolver), reference)
        if key not in self.found:
            try:
                self.found[key] = self.resolver.lookup(reference), self.resolver
            except Exception:  # noqa: BLE001 - what a malformed document raises is not specified
                shown = reference[:_MAX_SHOWN]
                raise SchemaError(f"{keyword} at {self.path} names {shown}, which is not in the schema") from None
        found, _ = self.found[key]
        return self._at(found.contents, reference[:_MAX_SHOWN], found.resolver)

    def error(self, limit: str, *keys: str) -> SchemaError:
        return SchemaError(f"{'/'.join((self.path, *keys))} must be {limit}")

    def refused(self, keyword: str, why: str = "cannot be enforced") -> SchemaError:
        return SchemaError(f"{keyword} at {self.path} {why}")

    def _at(self, schema: Any, path: str, resolver: Resolver[Any]) -> Subschema:
        if isinstance(schema, dict) and "$id" in schema and not (self.draft and "$ref" in schema):
            try:
                resolver = resolver.in_subresource(_ANY_DRAFT.create_resource(schema))
            except Exception as error:  # noqa: BLE001 - as in `target`
                raise SchemaError(f"$id at {path} must be a URI ({_short(error)})") from None
        return Subschema(schema, path, resolver, self.draft, self.found)


def target_of(reference: str, root: dict[str, Any]) -> Any:
    """Return the schema in a document to which a reference leads; None if there is none."""
    try:
        return replace(Subschema.root(root), schema={"$ref": reference}).target("$ref").schema
    except SchemaError:
        return None


def is_ambiguous(root: dict[str, Any], keyword: str) -> bool:
    """Return whether a dynamic reference may have several targets, which depend on the way that leads to it."""
    anchor = "$dynamicAnchor" if keyword == "$dynamicRef" else "$recursiveAnchor"
    return json.dumps(root).count(f'"{anchor}":') > 1


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_SHOWN]
