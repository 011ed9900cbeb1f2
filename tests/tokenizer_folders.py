"""Folders with a small tokenizer of every kind that models come with, as their files are in the wild."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.models import CORPUS, make_tokenizer
from tests.pooling_models import unigram, wordpiece

RANKS = {bytes([i]): i for i in range(256)} | {
    token: 256 + i for i, token in enumerate([b"th", b" th", b"the", b" the", b"qu", "日本".encode(), b"12"])
}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def byte_fallback() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer that falls back to bytes as Llama 2's tokenizer.json does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    tokens = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special + tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][: len(special)]  # bytes are tokens like others
    tokenizer = Tokenizer.from_str(json.dumps(state))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def llama_over_bytes() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the decoder that transformers gives one of a GGUF file of Llama's kind."""
    tokenizer = make_tokenizer()
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([*steps, decoders.ByteLevel()])
    return tokenizer


def words() -> transformers.PreTrainedTokenizerFast:
    """Whole words, without a decoder."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "a", "the", "quick", "dog", ",", "."])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def save_tiktoken(path: Path) -> None:
    lines = (base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items())
    path.write_bytes(b"\n".join(lines) + b"\n")


def save_kimi(folder: Path) -> None:
    save_tiktoken(folder / "tiktoken.model")
    first = len(RANKS)
    added = {first: {"content": "[BOS]", "special": True}, first + 2: {"content": "<|im_end|>", "special": True}}
    added[first + 5] = {"content": "<think>", "special": False}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "bos_token": "[BOS]"}
    write_json(
        folder / "tokenizer_config.json", {**config, "auto_map": {"AutoTokenizer": ["tokenization_kimi.K", None]}}
    )


def save_qwen(folder: Path) -> None:
    save_tiktoken(folder / "qwen.tiktoken")
    config = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWen", None]}}
    write_json(folder / "tokenizer_config.json", config)


def save_tekken(folder: Path) -> None:
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    special = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(["<unk>", "<s>", "</s>"])]
    tokens = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in RANKS.items()]
    size = len(RANKS) + 10
    config = {"pattern": pattern, "default_vocab_size": size, "default_num_special_tokens": 10, "version": "v11"}
    write_json(folder / "tekken.json", {"config": config, "vocab": tokens, "special_tokens": special})


def save_sentencepiece(folder: Path, kind: str, tokenizer_class: str, **options: Any) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=model, model_type=kind, minloglevel=2, num_threads=1, **options
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer_class})


def save_gpt2(folder: Path) -> None:
    state = json.loads(make_tokenizer().backend_tokenizer.to_str())
    write_json(folder / "vocab.json", state["model"]["vocab"])
    merges = "\n".join(" ".join(pair) for pair in state["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})


def save_bert(folder: Path) -> None:
    vocabulary = wordpiece().get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})


KINDS: dict[str, Callable[[Path], Any]] = {
    "byte-level": lambda folder: make_tokenizer().save_pretrained(folder),
    "llama-over-bytes": lambda folder: llama_over_bytes().save_pretrained(folder),
    "byte-fallback": lambda folder: byte_fallback().save_pretrained(folder),
    "wordpiece": lambda folder: wordpiece().save_pretrained(folder),
    "unigram": lambda folder: unigram().save_pretrained(folder),
    "words": lambda folder: words().save_pretrained(folder),
    "kimi": save_kimi,
    "qwen": save_qwen,
    "tekken": save_tekken,
    "gpt2": save_gpt2,
    "bert": save_bert,
    "spm-unigram": lambda folder: save_sentencepiece(
        folder, "unigram", "T5Tokenizer", vocab_size=120, hard_vocab_limit=False
    ),
    "spm-bpe": lambda folder: save_sentencepiece(
        folder, "bpe", "LlamaTokenizer", vocab_size=400, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False
    ),
}  # fmt: skip


def make_folder(folder: Path, kind: str) -> Path:
    write_json(folder / "config.json", {"model_type": "llama"})
    KINDS[kind](folder)
    return folder
