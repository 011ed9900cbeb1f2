"""Finds the folder of a model by name, and reads the small JSON files in it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine import pocket
from engine.errors import ConfigError, ModelFolderError
from engine.json_file import MAX_INDEX_BYTES, read_object
from engine.model.checkpoint import smollm2
from engine.model.checkpoint.fields import Fields, reading
from engine.model.checkpoint.gguf.folder import INDEX as GGUF_INDEX
from engine.model.checkpoint.gguf.folder import gguf_folder, parts_of
from engine.safetensors_header import read_header
from engine.text.tokenizer_files import VOCABULARY_FILES

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<gguf>[\w./-]+))?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
CONFIG_FILES = ["config.json", "generation_config.json", "modules.json", "config_sentence_transformers.json"]
TOKENIZER_FILES = [*VOCABULARY_FILES, "*token*.json", "chat_template.*", "additional_chat_templates/*"]
HUB_IGNORED = ["*/*", "consolidated*"]  # copies of the weights in other layouts
INDEX = "model.safetensors.index.json"
WEIGHTS_FILE = re.compile(r"[\w-][\w. -]*\.safetensors")
STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors names them
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
RECOMMENDED_FIELDS = {  # of generation_config.json, by their names in SamplingParams
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "max_tokens": "max_new_tokens",
}  # fmt: skip
# fields that may be overridden without effect, as in vLLM
WITHOUT_EFFECT = ("bos_token_id", "do_sample", "eos_token_id", "max_length", "pad_token_id", "transformers_version")


def resolve(model: str, weights: bool = True) -> Path:
    """Return the folder of a model, downloading it if needed.

    model: a local path; a Hub id, "org/name" or "org/name@revision"; `pocket` (bundled) or `smollm2` (fetched by
    `manta pull`); or a GGUF file, "org/name:file.gguf" or, as in vLLM, "org/name:Q4_K_M", which becomes a folder.
    weights: False if none are needed. Raises ModelFolderError if there is no such folder, or if it lacks config.json or
    safetensors weights.
    """
    folder = _find(model, HUB_FILES)
    _check(folder, weights)
    return folder


def resolve_config(model: str) -> Path:
    """Return a folder with the model's config.json, like `resolve`, but download only a few small files."""
    folder = _find(model, CONFIG_FILES)
    _check(folder, weights=False)
    return folder


def resolve_tokenizer(model: str) -> Path:
    """Return a folder with the model's tokenizer, like `resolve`, but download nothing else."""
    return _find(model, [*CONFIG_FILES, *TOKENIZER_FILES])


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer and of the chat templates, and folders that have nothing else."""
    found = [file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)]
    return list(dict.fromkeys(folder / file.relative_to(folder).parts[0] for file in found))


def _find(model: str, files: list[str]) -> Path:
    if model == "pocket":
        return pocket.PATH
    if model == smollm2.DEFAULT:
        return _find(smollm2.default_model(), files)
    if model == smollm2.NAME:
        if not smollm2.path().is_file():
            raise ModelFolderError(model, f"has not been fetched: manta pull {model}")
        return gguf_folder(smollm2.path())
    if (path := Path(model).expanduser()).is_dir():
        return _folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return gguf_folder(path)
    if (hub := HUB_ID.fullmatch(model)) and not model.startswith("."):
        if (wanted := hub["gguf"]) is None:
            return _folder(_download(hub["repo"], hub["revision"], files))
        # a file's name, or the name of a quantization, which is in the name of the only file or of each of its parts
        patterns = [wanted] if wanted.endswith(".gguf") else [f"*{wanted}{rest}" for rest in (".gguf", "-*-of-*.gguf")]
        folder = _download(hub["repo"], hub["revision"], patterns, [])
        return _only_gguf(model, [file for pattern in patterns for file in folder.rglob(pattern)])
    raise ModelFolderError(model, "no such folder, and it does not look like a Hub id (org/name) either")


def _folder(folder: Path) -> Path:
    """Return `folder` if it is a model's folder, or else the folder made from the GGUF file in it."""
    files = [] if (folder / "config.json").is_file() else list(folder.glob("*.gguf"))
    return _only_gguf(str(folder), files) if files else folder


def _only_gguf(model: str, files: list[Path]) -> Path:
    firsts = sorted({parts_of(file)[0] for file in files})
    if len(firsts) != 1:
        found = (
            f"has {len(firsts)} models, name one: {', '.join(f.name for f in firsts)}" if firsts else "has no such file"
        )
        raise ModelFolderError(model, found)
    return gguf_folder(firsts[0])


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object. Raises ModelFolderError if the file is missing or holds anything else."""
    return read_object(folder / name)


def weight_files(folder: Path) -> list[Path]:
    """Return the model's safetensors files; if there is an index, only the files that it names. For a GGUF file, return
    the index of its tensors."""
    if (folder / GGUF_INDEX).exists():
        return [folder / GGUF_INDEX]
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    return sorted(folder.glob("*.safetensors"))


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
        named = _generation_config(folder).get("eos_token_id")
    return as_token_ids(read_json(folder, "config.json").get("eos_token_id") if named is None else named)


def as_token_ids(named: int | list[int] | None) -> frozenset[int]:
    return frozenset(named if isinstance(named, list) else [] if named is None else [named])


def has_image_processor(folder: Path) -> bool:
    return any((folder / name).is_file() for name in IMAGE_PROCESSOR_FILES)


def default_sampling(
    folder: Path, source: str = "auto", override: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the default sampling parameters, by their names in SamplingParams.

    source: `auto` for what the model's authors recommend in its generation_config.json, `vllm` for nothing, or a folder
    with another such file. override: fields of the file that take precedence. Raises ConfigError for an unknown one.
    """
    for name in override:
        if name not in (*RECOMMENDED_FIELDS.values(), *WITHOUT_EFFECT):
            limit = f"one of {', '.join(RECOMMENDED_FIELDS.values())}"
            raise ConfigError("override_generation_config", name, limit)
    own = {} if source == "vllm" else _generation_config(folder if source == "auto" else Path(source))
    if source not in ("auto", "vllm"):
        read_json(Path(source), "generation_config.json")  # raises if it is missing
    given = {name: override.get(field, own.get(field)) for name, field in RECOMMENDED_FIELDS.items()}
    return {name: value for name, value in given.items() if value is not None}


def _generation_config(folder: Path) -> Fields:
    """Return the contents of generation_config.json, empty if it is missing. Some tools write `null` into it."""
    file = folder / "generation_config.json"
    if not file.exists() or file.read_bytes().strip() == b"null":
        return Fields({})
    return Fields(read_json(folder, file.name))


def _download(model: str, revision: str | None, files: list[str], ignored: list[str] = HUB_IGNORED) -> Path:
    """Download a model's files, or return a complete local copy without the network. Raises ModelFolderError."""
    from huggingface_hub import snapshot_download  # slow to import, and not needed for a local folder

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files, ignore_patterns=ignored))
    # OSError: unreachable, offline, not found, gated, disk full
    except (OSError, ValueError) as e:
        reason = " ".join(str(e).split())
        problem = (
            "no such local folder, and it could not be downloaded from the Hugging Face Hub: "
            f"{type(e).__name__}: {reason}"
        )
        raise ModelFolderError(model, problem) from e


def _check(folder: Path, weights: bool) -> None:
    if not (folder / "config.json").is_file():
        raise ModelFolderError(str(folder), "has no config.json")
    if weights and not weight_files(folder):
        others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.gguf") for p in folder.glob(pattern))
        found = f"only {', '.join(others)}; convert them first" if others else "and no other weights either"
        raise ModelFolderError(str(folder), f"has no *.safetensors, {found}")
