"""Bounds of a tokenizer.json, which anybody may have written: what it makes of a text stays in proportion to the text.

`tokenizers` computes whatever a file says: a step that replaces a letter by a million, special tokens of a million ids,
or a table whose length the file makes up, for which it asks the system and aborts the process. Bounds are far above all
published files. Its regular expressions are bounded by Oniguruma itself, which gives up after ten million steps.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from engine.errors import ModelFolderError
from engine.text.tokenizer_files import is_of_tokenizers

MAX_BYTES = 128 << 20  # the largest published files have 34 MB
MAX_STEPS = 32  # of a normalizer, pre-tokenizer, post-processor or decoder
MAX_LEVELS = 16
MAX_GROWTH = 128  # characters that all steps together make of one; sentencepiece's own table makes 33 bytes of U+FDFA
MAX_TEXT = 1024  # characters of a token or of a prefix; the longest published are 128 to 512 spaces
MAX_PATTERN = 16 << 10  # characters of a regular expression
MAX_SPECIAL = 64  # tokens that are put around a text
MAX_WORD = 1000  # characters that WordPiece takes as one word, in time that grows with their square

PROBES = ("", "a", "An ocean is 42\n\n  wide. ", "é ñ 中文 \U0001f30a \u200d", " " * 100, "aB1_" * 50)


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    continuing_subword_prefix: str | None = ""
    end_of_word_suffix: str | None = ""
    max_input_chars_per_word: int = 0


class _Token(msgspec.Struct):
    content: str


class _File(msgspec.Struct):
    """The parts of a tokenizer.json that are bounded."""

    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    added_tokens: list[_Token] = []


def read_bounded(file: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json. Raises ModelFolderError for one that cannot be read or exceeds a bound."""
    with _readable(file.parent, file.name):
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it must have at most {MAX_BYTES:,} bytes, got {size:,}")
        content = file.read_bytes()
        _check(msgspec.json.decode(content, type=_File))
        return tokenizers.Tokenizer.from_buffer(content)


def try_out(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Raise ModelFolderError if a tokenizer fails with plain text, which would otherwise be found by requests."""
    with _readable(folder, "its tokenizer"):
        for text in PROBES:
            tokenizer.decode(tokenizer.encode(text).ids)


@contextmanager
def _readable(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        problem = "it is nested too deeply"
    except (AttributeError, LookupError, StopIteration, TypeError) as error:
        problem = f"it has another form ({error!r})"
    except BaseException as error:
        if not is_of_tokenizers(error) and not isinstance(error, (OSError, ValueError)):
            raise
        problem = " ".join(str(error).split())
    else:
        return
    raise ModelFolderError(str(folder), f"{name} cannot be read: {problem}")


def _check(file: _File) -> None:
    """Raise ValueError for what exceeds a bound."""
    growth = 1.0
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = list(_steps(getattr(file, name), MAX_LEVELS))
        _bound(f"steps of its {name}", len(steps), MAX_STEPS)
        growth = 1.0 if name == "decoder" else growth
        for step in steps:
            growth *= _growth(step)
            _check_step(step)
        _bound(f"characters that its {name} makes of one", growth, MAX_GROWTH)
    vocab, model = file.model.vocab, file.model
    texts = [*(vocab if isinstance(vocab, dict) else (token for token, _ in vocab))]
    texts += [token.content for token in file.added_tokens]
    texts += [model.continuing_subword_prefix or "", model.end_of_word_suffix or ""]
    _bound("characters of a token", max(map(len, texts)), MAX_TEXT)
    _bound("max_input_chars_per_word", model.max_input_chars_per_word, MAX_WORD)


def _steps(part: Any, levels: int) -> Iterator[dict[str, Any]]:
    """Yield a part, and the steps in it if it is a sequence."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise ValueError("a step must be an object")
    _bound("levels of its steps", MAX_LEVELS + 1 - levels, MAX_LEVELS)
    yield part
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        for step in part.get(name) or []:
            yield from _steps(step, levels - 1)


def _growth(step: dict[str, Any]) -> float:
    """Return at most how many characters a step makes of one, by what it puts in place of it."""
    if isinstance(table := step.get("precompiled_charsmap"), str):
        return _longest_in_table(table)
    content, pattern = step.get("content"), step.get("pattern")
    if not isinstance(content, str) or not isinstance(pattern, dict):
        return 1.0
    plain = pattern.get("String")
    return max(1.0, len(content) / len(plain)) if isinstance(plain, str) and plain else 1.0 + len(content)


def _check_step(step: dict[str, Any]) -> None:
    for name in ("prepend", "content", "prefix", "suffix"):
        if isinstance(text := step.get(name), str):
            _bound(f"characters of {name}", len(text), MAX_TEXT)
    for name in ("start", "stop", "length"):
        if isinstance(number := step.get(name), int):
            _bound(name, number, MAX_TEXT)
    if isinstance(pattern := step.get("pattern"), dict):
        _bound("characters of a pattern", max((len(str(text)) for text in pattern.values()), default=0), MAX_PATTERN)
    if isinstance(step.get("single"), list):
        _check_template(step)


def _check_template(step: dict[str, Any]) -> None:
    """Check which special tokens are put around a text or a pair of texts."""
    ids = {name: len(token.get("ids", [])) for name, token in step.get("special_tokens", {}).items()}
    for name in ("single", "pair"):
        names = [next(iter(piece.values()))["id"] for piece in step.get(name) or []]
        _bound(f"tokens around a text ({name})", sum(ids.get(each, 1) for each in names), MAX_SPECIAL)


def _longest_in_table(table: str) -> int:
    """Return how many bytes sentencepiece's table makes of a character, at most. It has the length of a trie in bytes,
    the trie, and texts that end with 0. Raises ValueError if the trie would end behind the table."""
    content = base64.b64decode(table)
    length = int.from_bytes(content[:4], "little")
    if len(content) < 4 or length % 4 or length > len(content) - 4:
        raise ValueError(f"precompiled_charsmap must have a trie within its {len(content)} bytes, got {length}")
    return max(map(len, content[4 + length :].split(b"\0")), default=0) or 1


def _bound(what: str, got: float, most: int) -> None:
    if got > most:
        raise ValueError(f"{what} must be at most {most:,}, got {got:,g}")
