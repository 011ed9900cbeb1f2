"""Reads JSON files of models, which anybody may have written, within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelFolderError

MAX_BYTES = 8 << 20  # parsed, a file can take thirty times its size
MAX_INDEX_BYTES = 32 << 20  # of an index, which names every tensor
MAX_DEPTH = 32


def read_object(file: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object. Raises ModelFolderError for a missing file, and for one that holds anything else."""
    value = read_json(file, max_bytes)
    if not isinstance(value, dict):
        raise ModelFolderError(str(file.parent), f"{file.name} is not a JSON object")
    return value


def read_json(file: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON file. Raises ModelFolderError for a missing file, and for one that is not JSON, is large or deeply
    nested."""
    try:
        if not file.is_file():  # a pipe would wait for a writer
            raise ModelFolderError(str(file.parent), f"has no {file.name}")
        if (size := file.stat().st_size) > max_bytes:
            problem = f"{file.name} must have at most {max_bytes:,} bytes, got {size:,}"
            raise ModelFolderError(str(file.parent), problem)
        content = file.read_bytes()
        value = json.loads(content, object_hook=_decode_float)
        if b"\\ud" in content or b"\\uD" in content:
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a character, which no file can hold
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise ModelFolderError(str(file.parent), f"{file.name} is not valid JSON: {error}") from None
    except RecursionError:
        value = None
        deep = True
    else:
        deep = _deeper(value, MAX_DEPTH)
    if deep:
        raise ModelFolderError(str(file.parent), f"{file.name} must have at most {MAX_DEPTH} levels, got more")
    return value


def _deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested in more levels. Does not recurse, as they may be nested deeply."""
    below = [value]
    for _ in range(levels + 1):
        inside: list[Any] = []
        for each in below:
            if isinstance(each, dict):
                inside.extend(each.values())
            elif isinstance(each, list):
                inside.extend(each)
        if not inside:
            return False
        below = inside
    return True


def _decode_float(value: dict[str, Any]) -> Any:
    """Return the number that transformers 5 writes as {"__float__": "Infinity"}, since JSON has no infinity."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
