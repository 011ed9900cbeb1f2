"""The dtype of stored weights, for a config.json that names none."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from engine.errors import ModelFolderError
from engine.model.checkpoint.folder import weight_files
from engine.model.checkpoint.safetensors_header import read_header

STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors names them


def stored_dtype(folder: Path) -> str | None:
    """Return the dtype in which most unquantized numbers are stored; None if there are no such numbers. Reads headers
    only, without torch."""
    counts: Counter[str] = Counter()
    for file in weight_files(folder):
        try:
            header = read_header(file)
        except (OSError, ValueError) as e:
            raise ModelFolderError(str(folder), f"cannot read {file.name}: {e}") from e
        for tensor in header.values():
            if tensor.dtype in STORED_DTYPES:
                counts[STORED_DTYPES[tensor.dtype]] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else None
