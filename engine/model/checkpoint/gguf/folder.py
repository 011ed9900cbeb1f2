"""Makes a model folder from a GGUF file, in the cache: config.json, tokenizer and chat template from the metadata, an
index of the tensors, and links to the file. It is read like any other model folder."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelFolderError
from engine.model.checkpoint.cache import made_folder
from engine.model.checkpoint.gguf import config, names, tokenizer
from engine.model.checkpoint.gguf.entry import TYPES, Entry
from engine.model.checkpoint.gguf.header import Header
from engine.model.checkpoint.gguf.keys import GGUFError, Metadata
from engine.model.checkpoint.gguf.source import GGUFSource
from engine.model.checkpoint.gguf.tokenizer import UnsupportedTokenizer

logger = logging.getLogger(__name__)

INDEX = "gguf_tensors.json"
VERSION = 3  # version of the folders made here
PART = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
            "repetition_penalty": "penalty_repeat"}  # fmt: skip


def parts_of(file: Path) -> list[Path]:
    """Return the files of a model: the file itself, or, if it is one of several parts, all parts."""
    match = PART.fullmatch(file.name)
    return [file] if match is None else sorted(file.parent.glob(f"{match[1]}-?????-of-?????.gguf"))


def gguf_folder(file: Path) -> Path:
    """Return the model folder of a GGUF file. The first call makes it, which takes seconds.

    Raises ModelFolderError that names what is not supported.
    """
    files = [part.absolute() for part in parts_of(file)]
    try:
        stats = [(str(part), part.stat()) for part in files]
        state = ["gguf", VERSION, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]
        return made_folder(state, lambda folder: _fill(folder, files))
    except (GGUFError, UnsupportedTokenizer) as error:
        raise ModelFolderError(str(file), str(error)) from None
    except (OSError, ValueError, IndexError, KeyError) as error:
        problem = f"cannot be read as GGUF: {type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelFolderError(str(file), problem) from error


def _fill(folder: Path, files: list[Path]) -> None:
    started = time.monotonic()
    metadata, tensors = _read(files)
    checked = {entry.type for entry in tensors.values()} - TYPES.keys()
    if checked:
        limit = f"must be one of {', '.join(TYPES)}"
        raise GGUFError(f"its tensors of type {', '.join(sorted(checked))} are not supported: {limit}")
    source = GGUFSource(metadata, tensors, _rope_factors(files, tensors))
    found = names.entries(source)
    fields = config.config(source)
    backend = tokenizer.read_tokenizer(metadata)
    if types := names.types(found):
        fields["quantization_config"] = {"quant_method": "gguf", "types": types}
    for part in files:
        (folder / part.name).symlink_to(part)
    (folder / INDEX).write_bytes(msgspec.json.encode(found))
    _write(folder / "config.json", fields)
    sampling = {name: metadata.get(f"general.sampling.{own}") for name, own in SAMPLING.items()}
    ends = {"eos_token_id": tokenizer.eos_token_ids(metadata)}
    _write(folder / "generation_config.json", {**ends, **{k: v for k, v in sampling.items() if v is not None}})
    backend.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", tokenizer.special_tokens(metadata))
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if (template := metadata.get("tokenizer.chat_template.tool_use")) is not None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(template, encoding="utf-8")
    logger.info("gguf file=%s made=%s seconds=%.1f", files[0], folder, time.monotonic() - started)


def _read(files: list[Path]) -> tuple[Metadata, dict[str, Entry]]:
    """Read the metadata, which is in the first part, and the position of each tensor."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, Entry] = {}
    for file in files:
        header = Header(file)
        metadata = header.metadata | metadata
        tensors |= header.tensors
    return metadata, tensors


def _rope_factors(files: list[Path], tensors: dict[str, Entry]) -> dict[str, list[float]]:
    """Read the file's tensors of rotary factors, which are the same for all layers."""
    import numpy as np

    paths, found = {file.name: file for file in files}, {}
    for name in names.ROPE_FACTORS:
        if (entry := tensors.get(name) or tensors.get(f"blk.0.{name}")) is not None:
            if entry.type != "F32" or len(entry.shape) > 1:
                raise GGUFError(f"its tensor {name} must be a list of F32, got {entry.type} {list(entry.shape)}")
            found[name] = np.fromfile(paths[entry.file], np.float32, entry.shape[0], offset=entry.offset).tolist()
    return found


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
