"""Makes a folder of links to a model's files, with another tokenizer or with other fields in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.checkpoint.cache import made_folder
from engine.model.checkpoint.folder import read_json
from engine.model.checkpoint.resolve import resolve, resolve_tokenizer, tokenizer_files


def engine_folder(config: EngineConfig) -> Path:
    """Return the folder that an engine reads: the model's own, or a folder of links. Raises ConfigError or
    ModelFolderError."""
    folder = resolve(config.model, weights=config.load_format == "auto")
    if config.tokenizer is None and config.hf_overrides is None:
        return folder
    links = {file.name: file.resolve() for file in folder.iterdir()}
    if config.tokenizer is not None:
        replaced = {file.name for file in tokenizer_files(folder)}
        others = {file.name: file.resolve() for file in tokenizer_files(resolve_tokenizer(config.tokenizer))}
        links = {name: file for name, file in links.items() if name not in replaced} | others
    own = read_json(folder, "config.json")
    fields = _merged(own, _named_as(own, _overrides(config.hf_overrides)))
    state = [fields, sorted((name, str(file), file.stat().st_mtime_ns) for name, file in links.items())]

    def fill(folder: Path) -> None:
        for name in links.keys() - {"config.json"}:
            (folder / name).symlink_to(links[name])
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")

    return made_folder(state, fill)


def _overrides(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError("hf_overrides", text, 'a JSON object, such as {"rope_theta": 1e6}')
    return found


def _named_as(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides with rotary parameters under the names that the fields use. Since transformers 5 that is
    `rope_parameters`, which holds what `rope_scaling` and `rope_theta` held before.

    Raises ConfigError for the older names if the fields have one set per layer type.
    """
    parameters = fields.get("rope_parameters")
    old = [key for key in ("rope_scaling", "rope_theta") if key in overrides]
    if not isinstance(parameters, dict) or not old:
        return overrides
    if any(isinstance(value, dict) for value in parameters.values()):
        limit = "rope_parameters, as in the model's config.json: one set for each kind of layer"
        raise ConfigError("hf_overrides", old[0], limit)
    new = {**(overrides.get("rope_scaling") or {}), **{key: overrides[key] for key in old if key == "rope_theta"}}
    rest = {key: value for key, value in overrides.items() if key not in old}
    return {**rest, "rope_parameters": {**new, **rest.get("rope_parameters", {})}}


def _merged(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the overrides applied, also inside nested objects."""
    both = {key for key, value in overrides.items() if isinstance(value, dict) and isinstance(fields.get(key), dict)}
    return fields | overrides | {key: _merged(fields[key], overrides[key]) for key in both}
