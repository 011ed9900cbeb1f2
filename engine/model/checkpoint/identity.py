"""Reads the identity of a model folder, from samples and without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelFolderError
from engine.model.checkpoint.safetensors_header import header_length
from engine.text.tokenizer_files import VOCABULARY_FILES
from engine.wire.generate_request import ModelIdentity

PAGE = 4096  # bytes
PAGES = 64  # pages read from every weights file


def identity_of(folder: Path) -> ModelIdentity:
    """Return the identity of the model in `folder`. Reads only samples, without torch. Raises ModelFolderError."""
    try:
        weights = hashlib.sha256((folder / "config.json").read_bytes())
        sample_weights(weights, sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf"))))
        return ModelIdentity(short(weights), _vocabulary(folder))
    except (OSError, ValueError) as error:
        raise ModelFolderError(str(folder), f"cannot be read: {error}") from error


def sample_weights(digest: hashlib._Hash, files: Iterable[Path]) -> None:
    """Add to `digest` the names, sizes, safetensors headers and a sample of the pages of these files. This
    distinguishes models and versions in milliseconds, but does not detect a deliberate change of a few bytes. Raises
    OSError or ValueError."""
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size} ".encode())
            if path.suffix == ".safetensors":
                digest.update(file.read(8 + header_length(path)))
            for page in range(PAGES):
                file.seek(page * max(0, size - PAGE) // max(1, PAGES - 1))
                digest.update(file.read(PAGE))


def short(digest: hashlib._Hash) -> str:
    return digest.hexdigest()[:16]


def _vocabulary(folder: Path) -> str:
    """Return the digest of the tokenizer's parsed content, since two files with different text may hold the same
    vocabulary."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        files = [file for pattern in VOCABULARY_FILES for file in sorted(folder.glob(pattern))]
        return short(hashlib.sha256(b"".join(file.read_bytes() for file in files))) if files else ""
    try:
        written: Any = msgspec.json.decode(path.read_bytes())
        tokens = written["model"]["vocab"]  # a list of (token, score) for unigram models
        meaning = tokens.items() if isinstance(tokens, dict) else ((token, i) for i, (token, _) in enumerate(tokens))
        added = ((token["content"], token["id"]) for token in written.get("added_tokens") or [])
        return short(hashlib.sha256(msgspec.json.encode(sorted({*meaning, *added}))))
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise ModelFolderError(str(path.parent), f"tokenizer.json cannot be read: {error!r}") from error
