"""Reads an adapter's folder in PEFT's format, and checks all that can be checked without the model. Uses no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, deserialize

from engine import pocket
from engine.bucket_url import is_bucket
from engine.devices.host_memory import free_host_memory
from engine.errors import Described
from engine.lora.adapter_config import CONFIG_FILE, MERGE, AdapterConfig
from engine.lora.bucket import WEIGHTS_FILE, local_copy
from engine.lora.errors import AdapterError, AdapterNotFound
from engine.lora.module_patterns import MAX_LENGTH
from engine.model.checkpoint.resolve import HUB_ID
from engine.model.checkpoint.safetensors_header import read_header

POCKET_PIRATE = "pocket-pirate"  # path of the adapter that ships with the pocket model
PIRATE = Path(pocket.__file__).with_name("pirate")  # its folder
COPIES = 3  # the file, its tensors, and the part that a rank keeps
DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
# the adapter's name is left in by some trainers; PEFT takes it out as it saves
LOW_RANK = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight")
# PEFT's names for a parameter that holds the weights of all experts, and for another one of the same module
ALL_EXPERTS = re.compile(r"(?P<module>.+\.experts)(?:\.base_layer)?")
WHOLE = "with the names base_model.model.MODULE.lora_A.weight and lora_B.weight only: "
REFUSED = {
    "embed": "adapters of embeddings are not supported",
    "lm_head": "adapters of the output head are not supported",
}
"""Why modules with these parts in their names are refused."""


class TensorEntry(NamedTuple):
    """A tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class LowRank(NamedTuple):
    """The factors A and B of one linear layer. An adapter adds B A x, scaled, to the output of this layer for an input
    x."""

    a: TensorEntry
    """[rank, inputs]"""
    b: TensorEntry
    """[outputs, rank]"""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as its folder holds it."""

    name: str
    """Name of the adapter in error messages."""
    config: AdapterConfig
    modules: dict[str, LowRank]
    """Factors by the name of their module in the model that the adapter was trained on."""
    digest: str
    """Hash of all that decides what the adapter computes; 32 hexadecimal digits."""

    @property
    def rank(self) -> int:
        """The highest rank of the adapter's modules. Modules of all experts at once do not count, since their rank
        depends on the model's number of experts."""
        return max((pair.rank for name, pair in self.modules.items() if not ALL_EXPERTS.fullmatch(name)), default=0)


def open_adapter(path: str | Path, name: str = "") -> AdapterFiles:
    """Read an adapter from its folder, a bucket or the Hugging Face Hub. name: for errors, instead of the path.

    The files are read whole and only once, so the hash belongs to the weights in use even if the files change later.
    Raises AdapterError.
    """
    adapter = name or str(path)
    folder = _folder(path, adapter)
    config = AdapterConfig.read(folder, adapter)
    try:
        _check_size(folder / WEIGHTS_FILE, adapter)
        content = (folder / WEIGHTS_FILE).read_bytes()
    except FileNotFoundError:
        others = ", ".join(sorted(file.name for file in folder.glob("adapter_model*"))) or "none"
        limit = "in the folder; other formats have to be converted to it"
        raise AdapterNotFound(adapter, WEIGHTS_FILE, Described(others), limit) from None
    except OSError as error:
        raise AdapterError(adapter, WEIGHTS_FILE, str(error), "readable") from None
    except ValueError as error:
        raise AdapterError(adapter, WEIGHTS_FILE, str(error), "a whole safetensors file") from None
    modules = _modules(_tensors(content, adapter), adapter)
    for patterns in (config.alpha_pattern, config.rank_pattern):
        patterns.check_modules(len(modules))
    for name, pair in modules.items():
        if not ALL_EXPERTS.fullmatch(name):  # only the model says how many there are
            config.check_rank(name, pair.rank)
    digest = hashlib.blake2b(content, digest_size=16, person=b"manta-adapter")
    digest.update(config.arithmetic)
    return AdapterFiles(adapter, config, modules, digest.hexdigest())


def _check_size(file: Path, adapter: str) -> None:
    """Raise AdapterError if the file would not fit into memory as often as it is there while it is read, and OSError or
    ValueError if it is no safetensors file."""
    size, free = file.stat().st_size, free_host_memory()
    if COPIES * size > free.size:
        limit = f"at most a {COPIES}rd of the free memory: {free}"
        raise AdapterError(adapter, WEIGHTS_FILE, Described(f"{size / 2**30:.2f} GiB"), limit)
    read_header(file)


def _folder(path: str | Path, adapter: str) -> Path:
    if is_bucket(str(path)):
        return local_copy(str(path), adapter)
    folder = PIRATE if path == POCKET_PIRATE else Path(path).expanduser()
    if folder.is_dir():
        return folder
    if (hub := HUB_ID.fullmatch(str(path))) is None or str(path).startswith("."):
        raise AdapterNotFound(adapter, "path", str(path), "a folder, its URL in a bucket, or a Hub id (org/name)")
    from huggingface_hub import snapshot_download  # slow to import, and not needed for a local folder

    try:
        files = [CONFIG_FILE, WEIGHTS_FILE]
        return Path(snapshot_download(hub["repo"], revision=hub["revision"], allow_patterns=files))
    except (OSError, ValueError) as error:  # unreachable, offline, not found, gated, disk full
        reason = f"a folder, or a repository that the Hugging Face Hub can deliver ({type(error).__name__})"
        raise AdapterNotFound(adapter, "path", str(path), reason) from error


def _tensors(content: bytes, adapter: str) -> list[TensorEntry]:
    """Return the tensors of a safetensors file. Raises AdapterError if the file is incomplete."""
    try:
        found = deserialize(content)
    except SafetensorError as error:
        raise AdapterError(adapter, WEIGHTS_FILE, str(error), "a whole safetensors file") from None
    tensors = [TensorEntry(name, raw["dtype"], tuple(raw["shape"]), raw["data"]) for name, raw in found]
    for tensor in tensors:
        if len(tensor.name) > MAX_LENGTH:
            raise AdapterError(adapter, WEIGHTS_FILE, tensor.name, f"of names with at most {MAX_LENGTH} characters")
        if tensor.dtype not in DTYPES:
            raise AdapterError(adapter, tensor.name, tensor.dtype, f"of dtype {', '.join(DTYPES)}")
    return tensors


def _modules(tensors: Iterable[TensorEntry], adapter: str) -> dict[str, LowRank]:
    """Pair the factors of each module. Raises AdapterError for a tensor that is no factor, and for factors whose sizes
    do not match."""
    factors: dict[str, dict[str, TensorEntry]] = {}
    for tensor in tensors:
        if (match := LOW_RANK.fullmatch(tensor.name)) is None:
            why = next((f"{reason}; " for part, reason in REFUSED.items() if part in tensor.name), "")
            raise AdapterError(adapter, WEIGHTS_FILE, tensor.name, f"{WHOLE}{why}{MERGE}")
        pair = factors.setdefault(match["module"], {})
        if match["factor"] in pair:
            limit = f"of the same adapter as {pair[match['factor']].name}"
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
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or 0 in shapes[0] + shapes[1] or shapes[0][0] != shapes[1][1]:
        limit = "a matrix [rank, inputs] and a matrix [outputs, rank] of the same rank"
        raise AdapterError(adapter, module, Described(f"{list(shapes[0])} and {list(shapes[1])}"), limit)
    return found
