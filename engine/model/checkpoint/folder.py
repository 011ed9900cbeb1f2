"""Reads the small files in a model's folder, and finds its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from engine.errors import ModelFolderError
from engine.json_file import MAX_INDEX_BYTES, read_object
from engine.model.checkpoint.fields import Fields, reading

INDEX = "model.safetensors.index.json"
OTHER_FORMATS = {"gguf_tensors.json": ".checkpoint.gguf.tensors"}
"""Files that stand for weights in another format, each with the module below engine/model whose
`open_weights` opens it."""
WEIGHTS_FILE = re.compile(r"[\w-][\w. -]*\.safetensors")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object. Raises ModelFolderError if the file is missing or holds anything else."""
    return read_object(folder / name)


def weight_files(folder: Path) -> list[Path]:
    """Return the model's safetensors files; if there is an index, only the files that it names. If it has a file of
    OTHER_FORMATS, return that file."""
    if others := [folder / name for name in OTHER_FORMATS if (folder / name).exists()]:
        return others
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    return sorted(folder.glob("*.safetensors"))


def _indexed_files(folder: Path) -> list[Path]:
    """Return the files that the index names. Raises ModelFolderError for one outside the folder."""
    names = read_object(folder / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict):
        raise ModelFolderError(str(folder), f"{INDEX}: weight_map must be an object, got {str(names)[:50]}")
    for tensor, name in names.items():
        if not isinstance(name, str) or not WEIGHTS_FILE.fullmatch(name):
            problem = f"{INDEX}: weight_map.{tensor[:100]} must be the name of a *.safetensors file in the folder"
            raise ModelFolderError(str(folder), f"{problem}, got {str(name)[:100]!r}")
    return sorted({folder / name for name in names.values()})


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the tokens that end a generation. They come from generation_config.json, or, if it names none, from
    config.json, which may lack the token that ends a chat turn."""
    with reading(folder, "generation_config.json"):
        named = generation_config(folder).get("eos_token_id")
    return as_token_ids(read_json(folder, "config.json").get("eos_token_id") if named is None else named)


def as_token_ids(named: int | list[int] | None) -> frozenset[int]:
    return frozenset(named if isinstance(named, list) else [] if named is None else [named])


def generation_config(folder: Path) -> Fields:
    """Return the contents of generation_config.json, empty if it is missing. Some tools write `null` into it."""
    file = folder / "generation_config.json"
    if not file.exists() or file.read_bytes().strip() == b"null":
        return Fields({})
    return Fields(read_json(folder, file.name))
