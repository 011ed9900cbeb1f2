"""Makes a `tokenizers` tokenizer, and finds its special tokens, from the metadata of a GGUF file. An unknown kind of
vocabulary, or an unknown way to split texts, is refused, and the error names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

Metadata = Mapping[str, Any]
CONTROL, USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`
LISTS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "tokens": (str, "texts"), "merges": (str, "texts"), "token_type": (int, "numbers"),
    "scores": ((int, float), "numbers"),
}  # fmt: skip
MAX_TOKEN = 512  # characters; sentencepiece's vocabulary is searched for each way to cut a token
MAX_CHARACTERS = 8_000_000  # of all tokens; the largest vocabularies have 2,000,000
PADDING = re.compile(r"\[PAD\d+\]")  # llama.cpp's names for rows of the embedding without a token
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # our name -> the file's
# Tokens that end a turn, as in llama.cpp (src/llama-vocab.cpp). The file names one or two, but templates also use
# others. In gpt-oss, `<|end|>` ends only a message, and a turn can have several messages.
END_OF_TURN = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<|user|>", "<|observation|>",
)  # fmt: skip
HARMONY = {"<|return|>", "<|call|>", "<|end|>"}


class UnsupportedTokenizer(Exception):
    """The file's tokenizer cannot be rebuilt; the message says why."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a byte-level vocabulary splits a text before merging."""

    patterns: tuple[str, ...] = ()
    """Regular expressions for the pieces, each applied to what the one before has left whole; none for GPT-2's."""
    digits: bool = False
    """Whether each digit is a separate piece."""
    ignore_merges: bool = False
    """Whether a piece that is itself a token becomes that token without merging."""
    add_bos: bool = False
    """Whether texts begin with a special token if the file does not say."""


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+APOSTROPHE"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*APOSTROPHE"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = CASED.replace("APOSTROPHE", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", "{1,3}")
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
KIMI = "[\\p{Han}]+|" + CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(
    "APOSTROPHE", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
).replace("DIGITS", "{1,3}").replace(r"[\r\n/]*", r"[\r\n]*")
TEKKEN = CASED.replace("APOSTROPHE", "").replace("DIGITS", "")
# by `tokenizer.ggml.pre`
SPLITS: dict[str, Split] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "falcon-h1"),
        Split((LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("chatglm-bpe", "glm4", "dbrx", "smaug-bpe"), Split((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split((QWEN2,))),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((GPT4O,))),
    "qwen35": Split((QWEN35,)),
    "seed-coder": Split((SEED,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Split(DEEPSEEK3)),
    "kimi-k2": Split((KIMI,)),
    "tekken": Split((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), Split(digits=True)),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4"), Split()),
}


def read_tokenizer(metadata: Metadata) -> tokenizers.Tokenizer:
    """Build the tokenizer that the metadata describes. Raises UnsupportedTokenizer."""
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise UnsupportedTokenizer("it has no tokenizer.ggml.tokens")
    _check(metadata)
    if kind not in KINDS:
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.model = {kind!r} is not supported: must be one of {', '.join(KINDS)}"
        )
    try:
        tokenizer, add_bos = KINDS[kind](metadata)
        _add_tokens(tokenizer, metadata)
        _frame(tokenizer, metadata, add_bos)
    except (UnsupportedTokenizer, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - `tokenizers` raises plain Exception, and a panic in Rust is none
        raise UnsupportedTokenizer(f"its vocabulary cannot be read: {' '.join(str(error).split())[:200]}") from None
    return tokenizer


def _check(metadata: Metadata) -> None:
    """Raise UnsupportedTokenizer for a value of a wrong type, and for tokens that would take long to join."""
    for name, (kinds, what) in LISTS.items():
        values = metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
            raise UnsupportedTokenizer(f"tokenizer.ggml.{name} must be an array of {what}")
    count = len(metadata["tokenizer.ggml.tokens"])
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and value not in range(count):
            raise UnsupportedTokenizer(f"{key} must be a number below {count}, got {str(value)[:50]}")
    lengths = [len(token) for token in metadata["tokenizer.ggml.tokens"]]
    if max(lengths, default=0) > MAX_TOKEN or sum(lengths) > MAX_CHARACTERS:
        limit = f"at most {MAX_TOKEN} characters in a token, and {MAX_CHARACTERS:,} in all"
        raise UnsupportedTokenizer(f"tokenizer.ggml.tokens must have {limit}, got {max(lengths)} and {sum(lengths):,}")
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        if merge.count(" ") != 1:
            raise UnsupportedTokenizer(f"tokenizer.ggml.merges must be pairs of tokens, got {merge[:50]!r}")
    for key in ("tokenizer.chat_template", "tokenizer.chat_template.tool_use"):
        if not isinstance(metadata.get(key, ""), str):
            raise UnsupportedTokenizer(f"{key} must be a text")


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Return the special tokens by their names in tokenizer_config.json."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    ids = {name: metadata.get(f"tokenizer.ggml.{own}_token_id") for name, own in SPECIAL.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def eos_token_ids(metadata: Metadata) -> list[int]:
    """Return the tokens that end a generation: those that the file names, and those known to end a turn."""
    tokens, types = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    named = {int(metadata[key]) for key in keys if key in metadata}
    control = {tokens[i]: i for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)}
    ends = {control[token] for token in END_OF_TURN if token in control}
    if control.keys() >= HARMONY:
        ends.discard(control["<|end|>"])
        named.discard(control["<|end|>"])
    return sorted(named | ends)


def _byte_level(metadata: Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if (split := SPLITS.get(name or "")) is None:
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.pre = {name!r} is not supported: must be one of {', '.join(SPLITS)}"
        )
    vocab = {token: i for i, token in _tokens(metadata)}
    pairs = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges", ())]
    merges = [(left, right) for left, right in pairs]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=split.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(metadata: Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    """Build a BPE with byte fallback. sentencepiece stores no merges: it joins the pair with the best token."""
    architecture = metadata.get("general.architecture", "")
    vocab = {token: i for i, token in _tokens(metadata)}
    scores = metadata.get("tokenizer.ggml.scores") or []
    if architecture.startswith("gemma"):  # tokens are in the order of merges, scores are not
        scores = range(0, -len(vocab) - 1, -1)
        # tokens of several spaces are written with plain spaces
        vocab = {"▁" * len(token) if token and not token.strip(" ") else token: i for token, i in vocab.items()}
    if len(scores) < max(vocab.values()) + 1:
        raise UnsupportedTokenizer("it has no tokenizer.ggml.scores for its tokens")
    merges = [
        (scores[i], len(token[:cut]), len(token[cut:]), -vocab[token[:cut]], token[:cut], token[cut:])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda merge: merge[:4], reverse=True)
    return _of_texts(metadata, vocab, [merge[4:] for merge in merges], True), True


def _gemma4(metadata: Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    """Build a BPE with byte fallback from stored merges."""
    vocab = {token: i for i, token in _tokens(metadata)}
    pairs = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges", ())]
    return _of_texts(metadata, vocab, [(left, right) for left, right in pairs], False), True


def _of_texts(
    metadata: Metadata, vocab: dict[str, int], merges: list[tuple[str, str]], add_prefix: bool
) -> tokenizers.Tokenizer:
    """Build a BPE of whole texts, whose spaces become `▁`. add_prefix: whether a text gets one in front where the file
    does not say."""
    unknown = special_tokens(metadata).get("unk_token", "<unk>")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab, merges, unk_token=unknown if unknown in vocab else None, fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", add_prefix))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer


KINDS: dict[Any, Callable[[Metadata], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4,
}  # fmt: skip
"""Builders by `tokenizer.ggml.model`, with whether texts begin with a special token if the file does not say."""


def _tokens(metadata: Metadata) -> list[tuple[int, str]]:
    """Return tokens with their ids, without rows that are only padding."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return [(i, token) for i, token in enumerate(tokens) if not PADDING.fullmatch(token)]


def _add_tokens(tokenizer: tokenizers.Tokenizer, metadata: Metadata) -> None:
    """Add the tokens that are matched before a text is split: control tokens, and those added to the vocabulary."""
    types = metadata.get("tokenizer.ggml.token_type") or ()
    kinds = dict(enumerate(types))
    special = [AddedToken(t, normalized=False) for i, t in _tokens(metadata) if kinds.get(i) == CONTROL]
    others = [AddedToken(t, normalized=False) for i, t in _tokens(metadata) if kinds.get(i) == USER_DEFINED]
    known = set(special_tokens(metadata).values()) - {token.content for token in special + others}
    tokenizer.add_special_tokens([*special, *(AddedToken(token, normalized=False) for token in sorted(known))])
    tokenizer.add_tokens(others)


def _frame(tokenizer: tokenizers.Tokenizer, metadata: Metadata, add_bos: bool) -> None:
    """Make the tokenizer add the special tokens that the file asks for, before and after a text."""
    names, ends = special_tokens(metadata), []
    for name, default in (("bos", add_bos), ("eos", False)):
        token = names.get(f"{name}_token")
        asked = metadata.get(f"tokenizer.ggml.add_{name}_token", default)
        ends.append([token] if asked and token is not None else [])
    if any(ends):
        (before, after), ids = ends, [(token, tokenizer.token_to_id(token)) for token in {*ends[0], *ends[1]}]
        first, second = ([*before, f"${letter}", *after] for letter in "AB")
        second = [f"{part}:1" for part in second]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=first, pair=[*first, *second], special_tokens=ids
        )
