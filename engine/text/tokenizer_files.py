"""Reads the tokenizer of a model folder, whatever its format, as a `tokenizers` tokenizer.

Python code in the folder is never run. Formats other than tokenizer.json are converted by transformers, which functions
import only when needed, since that takes seconds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders

from engine.errors import ModelFolderError
from engine.json_file import read_object
from engine.text.tokenizer_bounds import read_bounded, try_out
from engine.wire.model_identity import VOCABULARY_FILES

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


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Read the tokenizer of a model folder, without truncation and padding. Raises ModelFolderError."""
    config = read_config(folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer = read_bounded(folder / "tokenizer.json")
        _add_tokens(folder, tokenizer, config)
    else:
        tokenizer = _convert(folder, config)
    # files of embedding models enable both, to bring all texts to one length
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try_out(tokenizer, folder)
    if decoder_steps(tokenizer)[-1:] == ["ByteLevel"]:
        # when transformers saves a tokenizer from llama.cpp it puts steps of sentencepiece before this one. With a
        # byte-level vocabulary they do nothing, unless one token outside it turns all the others into text.
        tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Return the types of the decoder's steps, in order."""
    if tokenizer.decoder is None:
        return []
    return [step["type"] for step in _decoder_steps(json.loads(tokenizer.decoder.__getstate__()))]


def _decoder_steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    parts = state.get("decoders")
    return [state] if parts is None else [step for part in parts for step in _decoder_steps(part)]


def read_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and special_tokens_map.json for keys missing in it. Raises ModelFolderError."""
    return {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by their names in a chat template, such as `bos_token`."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token") and value}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in contents.items() if isinstance(value, str)}


def chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: `default`, and for instance `tool_use`. Raises ModelFolderError if one is not
    text."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    found = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found if {"name", "template"} <= set(each)}
    named = found if isinstance(found, dict) else {} if found is None else {"default": found}
    if not all(isinstance(template, str) for template in named.values()):
        raise ModelFolderError(str(folder), "chat_template is neither a text nor a list of named templates")
    return named


def _add_tokens(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that tokenizer.json lacks, as transformers does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in sorted(_added_tokens(folder, config).items()):
        if token.content not in known:
            tokenizer.add_tokens([token])
            if (got := tokenizer.token_to_id(token.content)) != token_id:
                problem = (
                    f"added token {token.content[:100]!r} has the id {token_id}, but would get {got} after "
                    "the tokens of tokenizer.json"
                )
                raise ModelFolderError(str(folder), problem)
    named = set(special_tokens(config).values()) - known
    in_vocabulary = sorted(token for token in named if tokenizer.token_to_id(token) is not None)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in in_vocabulary])


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens by id, from tokenizer_config.json or else from the older added_tokens.json."""
    if (listed := config.get("added_tokens_decoder")) is None:
        named = special_tokens(config).values()
        ids = _read_json(folder / "added_tokens.json").items()
        if not all(isinstance(i, int) for _, i in ids):
            raise ModelFolderError(str(folder), "added_tokens.json is not an object of ids")
        listed = {i: {"content": t, "special": t in named, "normalized": t not in named} for t, i in ids}
    try:
        return {int(i): AddedToken(**fields) for i, fields in listed.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelFolderError(str(folder), f"its added tokens cannot be read: {error}") from error


def _convert(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
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
    added = _added_tokens(file.parent, config)
    converter = TikTokenConverter(str(file), **({"pattern": known.pattern} if known else {}))
    converter.load_tiktoken_bpe = lambda _: ranks
    tokenizer = converter.converted()
    first = max(ranks.values()) + 1
    end = max(first + (known.num_special_tokens if known else 0), *(token_id + 1 for token_id in added), first)
    name_of = known.special_tokens if known else lambda n: f"<|reserved_token_{n}|>"
    behind = [added.get(i) or AddedToken(name_of(i - first), special=True, normalized=False) for i in range(first, end)]
    tokenizer.add_tokens(behind)
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}
