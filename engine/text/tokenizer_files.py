"""Reads the tokenizer of a model folder as a `tokenizers` tokenizer."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders

from engine.errors import ModelFolderError
from engine.json_file import read_object

# of tokenizers that have no tokenizer.json: Mistral's, tiktoken's, sentencepiece's, GPT-2's and BERT's
VOCABULARY_FILES = ("tekken.json", "*.tiktoken", "*.model", "vocab.json", "merges.txt", "vocab.txt")
BOUNDS = ".tokenizer_bounds"  # reads a tokenizer.json that anybody may have written, and tries tokenizers out
CONVERTED = ".converted_tokenizer"  # reads formats other than tokenizer.json


def read_tokenizer(folder: Path, decodes: bool = False) -> tokenizers.Tokenizer:
    """Read the tokenizer of a model folder, without truncation and padding. decodes: whether tokens will be decoded to
    text one by one, which a few decoders do not support. Raises ModelFolderError."""
    config, bounds = read_config(folder), import_module(BOUNDS, __package__)
    tokenizer: tokenizers.Tokenizer
    if (folder / "tokenizer.json").is_file():
        tokenizer = bounds.read_bounded(folder / "tokenizer.json")
        _add_tokens(folder, tokenizer, config)
    else:
        tokenizer = import_module(CONVERTED, __package__).convert(folder, config)
    # files of embedding models enable both, to bring all texts to one length
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bounds.try_out(tokenizer, folder)
    if decoder_steps(tokenizer)[-1:] == ["ByteLevel"]:
        # when transformers saves a tokenizer from llama.cpp it puts steps of sentencepiece before this one. With a
        # byte-level vocabulary they do nothing, unless one token outside it turns all the others into text.
        tokenizer.decoder = decoders.ByteLevel()
    if decodes:
        check_decoder(tokenizer, folder)
    return tokenizer


def check_decoder(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Raise ModelFolderError if a token's text depends on its neighbours, other than at the start or end of a text."""
    steps = decoder_steps(tokenizer)
    after_fuse = steps[steps.index("Fuse") + 1 :] if "Fuse" in steps else []
    if "CTC" in steps or any(step not in ("Fuse", "Strip") for step in after_fuse):
        problem = f"the text of its tokens depends on their neighbours (decoder: {', '.join(steps)})"
        raise ModelFolderError(str(folder), problem)


def decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Return the types of the decoder's steps, in order."""
    if tokenizer.decoder is None:
        return []
    return [step["type"] for step in _decoder_steps(json.loads(tokenizer.decoder.__getstate__()))]


def _decoder_steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    parts = state.get("decoders")
    return [state] if parts is None else [step for part in parts for step in _decoder_steps(part)]


def is_of_tokenizers(error: BaseException) -> bool:
    """Return whether `tokenizers` itself has failed. Its panics derive from BaseException alone."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def read_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and special_tokens_map.json for keys missing in it. Raises ModelFolderError."""
    return {**read_if_there(folder / "special_tokens_map.json"), **read_if_there(folder / "tokenizer_config.json")}


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by their names in a chat template, such as `bos_token`."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token") and value}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in contents.items() if isinstance(value, str)}


def _add_tokens(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that tokenizer.json lacks, as transformers does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in sorted(added_tokens(folder, config).items()):
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


def added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens by id, from tokenizer_config.json or else from the older added_tokens.json."""
    if (listed := config.get("added_tokens_decoder")) is None:
        named = special_tokens(config).values()
        ids = read_if_there(folder / "added_tokens.json").items()
        if not all(isinstance(i, int) for _, i in ids):
            raise ModelFolderError(str(folder), "added_tokens.json is not an object of ids")
        listed = {i: {"content": t, "special": t in named, "normalized": t not in named} for t, i in ids}
    try:
        return {int(i): AddedToken(**fields) for i, fields in listed.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelFolderError(str(folder), f"its added tokens cannot be read: {error}") from error


def read_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty without the file. Raises ModelFolderError."""
    return read_object(path) if path.exists() else {}
