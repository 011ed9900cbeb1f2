"""A section of `args` in serve_config.yaml, parsed strictly."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def section_of(config: type, without: set[str], **types: Any) -> type[Section]:
    """Return a section with one key per field of the dataclass, so that the two always agree. types: keys whose type
    differs from that of their field."""
    hints = get_type_hints(config) | types
    keys: dict[str, Any] = {f.name: (hints[f.name], f.default) for f in fields(config) if f.name not in without}
    return create_model(config.__name__.replace("Config", "Section"), __base__=Section, **keys)


def given(section: Section) -> dict[str, Any]:
    """Return the keys that are set in the file, with their values."""
    return {key: getattr(section, key) for key in section.model_fields_set}
