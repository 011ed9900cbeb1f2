"""Finds the folder of a model by name: a local folder, one of the Hub, a GGUF file, or a bundled model."""

from __future__ import annotations

import re
from pathlib import Path

from engine import pocket
from engine.errors import ModelFolderError
from engine.model.checkpoint import smollm2
from engine.model.checkpoint.folder import weight_files
from engine.model.checkpoint.gguf.folder import gguf_folder, parts_of
from engine.model.checkpoint.identity import VOCABULARY_FILES

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<gguf>[\w./-]+))?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
CONFIG_FILES = ["config.json", "generation_config.json", "modules.json", "config_sentence_transformers.json"]
TOKENIZER_FILES = [*VOCABULARY_FILES, "*token*.json", "chat_template.*", "additional_chat_templates/*"]
HUB_IGNORED = ["*/*", "consolidated*"]  # copies of the weights in other layouts
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


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


def has_image_processor(folder: Path) -> bool:
    return any((folder / name).is_file() for name in IMAGE_PROCESSOR_FILES)


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
