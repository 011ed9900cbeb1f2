"""Converts tokenizers in formats other than tokenizer.json, by means of transformers.

Python code in the folder is never run. Functions import transformers only when needed, since that takes seconds.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import ModelFolderError
from engine.text.tokenizer_files import VOCABULARY_FILES, added_tokens

MAX_REASON = 300  # characters shown of an error message of transformers


@dataclass(frozen=True, slots=True)
class TiktokenClass:
    """Facts that a tokenizer's Python class defines and its tiktoken file lacks."""

    pattern: str
    """Regular expression for the pieces into which text is split before tokenizing."""
    special_tokens: Callable[[int], str]
    """Returns the name of the nth token after the vocabulary, for tokens without a name in tokenizer_config.json."""
    num_special_tokens: int


# the patterns of tokenization_kimi.py (Kimi K2) and tokenization_qwen.py (the first Qwen)
_KIMI = TiktokenClass(
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    lambda n: f"<|reserved_token_{n}|>",
    256,
)
_QWEN_NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN = TiktokenClass(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    lambda n: _QWEN_NAMES[n] if n < len(_QWEN_NAMES) else f"<|extra_{n - len(_QWEN_NAMES)}|>",
    208,
)
TIKTOKEN_CLASSES = {"TikTokenTokenizer": _KIMI, "QWenTokenizer": _QWEN}


def convert(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Convert the tokenizer of a model folder without tokenizer.json. Raises ModelFolderError."""
    files = [file for pattern in VOCABULARY_FILES for file in sorted(folder.glob(pattern))]
    if not files:
        names = ", ".join(["tokenizer.json", *VOCABULARY_FILES])
        raise ModelFolderError(str(folder), f"tokenizer.json is missing, and so is any other tokenizer ({names})")
    for file in files:
        if (ranks := _tiktoken_ranks(file)) is not None:
            return _convert_tiktoken(file, ranks, config)
    if files[0].suffix == ".model" and find_spec("sentencepiece") is None:
        raise ModelFolderError(str(folder), f"{files[0].name} needs the package sentencepiece, which is not installed")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        return converted.backend_tokenizer
    except Exception as error:  # its type depends on the kind of tokenizer
        reason = " ".join(str(error).split())[:MAX_REASON]
        if config.get("auto_map"):
            reason = "its tokenizer is Python code, which Manta does not run; save it as tokenizer.json"
        raise ModelFolderError(str(folder), f"{files[0].name} cannot be converted: {reason}") from error


def _tiktoken_ranks(file: Path) -> dict[bytes, int] | None:
    """Return the ids of a tiktoken file's tokens, read from lines of base64 and an id; None for any other file.

    tiktoken's own reader caches files by path, and so returns old content after a file has changed.
    """
    if file.suffix not in (".model", ".tiktoken"):
        return None
    try:
        lines = (line.split() for line in file.read_bytes().splitlines())
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError:
        return None


def _convert_tiktoken(file: Path, ranks: dict[bytes, int], config: dict[str, Any]) -> tokenizers.Tokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    known = TIKTOKEN_CLASSES.get(config.get("tokenizer_class", ""))
    if known is None and config.get("auto_map"):
        name = config.get("tokenizer_class")
        problem = (
            f"{file.name}: {name} splits text by Python code, which Manta does not run; save the "
            "tokenizer as tokenizer.json"
        )
        raise ModelFolderError(str(file.parent), problem)
    added = added_tokens(file.parent, config)
    converter = TikTokenConverter(str(file), **({"pattern": known.pattern} if known else {}))
    converter.load_tiktoken_bpe = lambda _: ranks
    tokenizer = converter.converted()
    first = max(ranks.values()) + 1
    end = max(first + (known.num_special_tokens if known else 0), *(token_id + 1 for token_id in added), first)
    name_of = known.special_tokens if known else lambda n: f"<|reserved_token_{n}|>"
    behind = [added.get(i) or AddedToken(name_of(i - first), special=True, normalized=False) for i in range(first, end)]
    tokenizer.add_tokens(behind)
    return tokenizer
