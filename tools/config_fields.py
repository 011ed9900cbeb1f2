"""Writes engine/model/families/declared_fields.json: the fields that transformers' configuration classes of the
native families declare, with their defaults. An update of transformers needs it: `python -m tools.config_fields`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from engine.model.families.encoders import ENCODERS
from engine.model.families.family import families
from engine.model.families.multimodal import TEXT_PARTS
from engine.model.families.unread import COMMON, DECLARED


def declared() -> dict[str, dict[str, Any]]:
    """Return the declared fields by architecture, and by model_type for the text parts of multimodal models."""
    types = {name: kind for kind, name in MODEL_MAPPING_NAMES.items() if isinstance(name, str)}
    types |= {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    parts = {kind for kinds, _ in TEXT_PARTS.values() for kind in kinds if kind.endswith("_text")}
    classes = {name: CONFIG_MAPPING[types[name]] for name in (*families(), *ENCODERS)}
    classes |= {name: CONFIG_MAPPING[name] for name in parts}
    common = {field.name: None for field in dataclasses.fields(PreTrainedConfig)}
    return {COMMON: common} | {name: _fields(kind) for name, kind in classes.items()}


def _fields(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the fields of a class that not all have, also under their other names."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    found = {field.name: _default(field) for field in dataclasses.fields(kind) if field.name not in common}
    return found | {alias: found[name] for alias, name in kind.attribute_map.items() if name in found}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def as_text(table: dict[str, dict[str, Any]]) -> str:
    """Return the contents of the file: one line for each class."""
    lines = [f"{json.dumps(name)}: {json.dumps(table[name], sort_keys=True)}" for name in sorted(table)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    Path(DECLARED).write_text(as_text(declared()))
