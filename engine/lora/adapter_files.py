"""An adapter's folder in PEFT's format, read and checked as far as that goes without the model. Without torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine import pocket
from engine.errors import AdapterError, AdapterNotFound, Described
from engine.lora.adapter_config import CONFIG_FILE, MERGE, AdapterConfig
from engine.model.checkpoint.folder import HUB_ID

POCKET_PIRATE = "pocket-pirate"  # path of the adapter that ships with the pocket model
WEIGHTS_FILE = "adapter_model.safetensors"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # dtypes, as safetensors names them
# the adapter's name is left in by some trainers; PEFT takes it out as it saves
LOW_RANK = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight")
WHOLE = "with the names base_model.model.MODULE.lora_A.weight and lora_B.weight only: "
EMBEDDING = "adapters of embeddings are not supported; "


class TensorEntry(NamedTuple):
    """A tensor in the file: bytes [start, end) of its content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class LowRank(NamedTuple):
    """The factors that an adapter adds to one linear layer: (B A) x, to be scaled."""

    a: TensorEntry
    """[rank, inputs]"""
    b: TensorEntry
    """[outputs, rank]"""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as it lies in its folder."""

    name: str
    """As errors name it."""
    config: AdapterConfig
    modules: dict[str, LowRank]
    """By the module's name in the model that it was trained on."""
    content: bytes = field(repr=False)
    """The file of the tensors."""
    digest: str
    """Hash of all that decides what the adapter computes; 32 hexadecimal digits."""

    @property
    def rank(self) -> int:
        """The highest rank of its modules."""
        return max(module.rank for module in self.modules.values())


def open_adapter(path: str | Path, name: str = "") -> AdapterFiles:
    """Read an adapter from its folder or the Hugging Face Hub. name: for errors, instead of the path.

    It is read whole, and once: what was hashed is what is used, whatever becomes of the files. Raises AdapterError.
    """
    adapter = name or str(path)
    folder = _folder(path, adapter)
    config = AdapterConfig.read(folder, adapter)
    try:
        content = (folder / WEIGHTS_FILE).read_bytes()
    except FileNotFoundError:
        others = ", ".join(sorted(file.name for file in folder.glob("adapter_model*"))) or "none"
        limit = "in the folder; other formats have to be converted to it"
        raise AdapterNotFound(adapter, WEIGHTS_FILE, Described(others), limit) from None
    except OSError as error:
        raise AdapterError(adapter, WEIGHTS_FILE, str(error), "readable") from None
    modules = _modules(_tensors(content, adapter), adapter)
    digest = hashlib.blake2b(content, digest_size=16, person=b"manta-adapter")
    digest.update(config.arithmetic)
    return AdapterFiles(adapter, config, modules, content, digest.hexdigest())


def _folder(path: str | Path, adapter: str) -> Path:
    folder = pocket.PIRATE if path == POCKET_PIRATE else Path(path).expanduser()
    if folder.is_dir():
        return folder
    if (hub := HUB_ID.fullmatch(str(path))) is None or str(path).startswith("."):
        raise AdapterNotFound(adapter, "path", str(path), "a folder, or a Hub id (org/name)")
    from huggingface_hub import snapshot_download  # slow to import, and not needed for a local folder

    try:
        files = [CONFIG_FILE, WEIGHTS_FILE]
        return Path(snapshot_download(hub["repo"], revision=hub["revision"], allow_patterns=files))
    except (OSError, ValueError) as error:  # unreachable, offline, not found, gated, disk full
        reason = f"a folder, or on the Hugging Face Hub, which did not give it: {type(error).__name__}"
        raise AdapterNotFound(adapter, "path", str(path), reason) from error


def _tensors(content: bytes, adapter: str) -> list[TensorEntry]:
    """Return the tensors of a safetensors file. Raises AdapterError if it is not whole."""
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        header: dict[str, Any] = json.loads(content[8:start])
        header.pop("__metadata__", None)
        tensors = [
            TensorEntry(name, raw["dtype"], tuple(raw["shape"]), *(start + offset for offset in raw["data_offsets"]))
            for name, raw in header.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise AdapterError(adapter, WEIGHTS_FILE, Described("another one"), "a whole safetensors file") from None
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise AdapterError(adapter, tensor.name, tensor.dtype, f"of dtype {', '.join(ITEM_BYTES)}")
        size = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if not start <= tensor.start <= tensor.end <= len(content) or tensor.end - tensor.start != size:
            found = Described(f"{len(content)} bytes; {tensor.name} ends at {tensor.start + size}")
            raise AdapterError(adapter, WEIGHTS_FILE, found, "whole")
    return tensors


def _modules(tensors: Iterable[TensorEntry], adapter: str) -> dict[str, LowRank]:
    """Pair the factors of each module. Raises AdapterError for any other tensor, and for factors that do not fit."""
    factors: dict[str, dict[str, TensorEntry]] = {}
    for tensor in tensors:
        if (match := LOW_RANK.fullmatch(tensor.name)) is None:
            why = EMBEDDING if "lora_embedding_" in tensor.name else ""
            raise AdapterError(adapter, WEIGHTS_FILE, tensor.name, f"{WHOLE}{why}{MERGE}")
        pair = factors.setdefault(match["module"], {})
        if match["factor"] in pair:
            limit = f"one adapter: {pair[match['factor']].name} is there too"
            raise AdapterError(adapter, WEIGHTS_FILE, tensor.name, limit)
        pair[match["factor"]] = tensor
    if not factors:
        raise AdapterError(adapter, WEIGHTS_FILE, Described("none"), "a file with tensors")
    return {module: _low_rank(module, pair, adapter) for module, pair in factors.items()}


def _low_rank(module: str, pair: dict[str, TensorEntry], adapter: str) -> LowRank:
    if len(pair) < 2:
        missing = "B" if "A" in pair else "A"
        raise AdapterError(adapter, f"{module}.lora_{missing}", None, f"in {WEIGHTS_FILE}")
    found = LowRank(pair["A"], pair["B"])
    shapes = found.a.shape, found.b.shape
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or not 0 < shapes[0][0] == shapes[1][1]:
        limit = "a matrix [rank, inputs] and a matrix [outputs, rank] of the same rank"
        raise AdapterError(adapter, module, Described(f"{list(shapes[0])} and {list(shapes[1])}"), limit)
    return found
