"""Tokenizers rebuilt from the metadata of GGUF files, against those that the metadata was made of."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.model.checkpoint.gguf.tokenizer import (
    SPLITS,
    UnsupportedTokenizer,
    eos_token_ids,
    read_tokenizer,
    special_tokens,
)
from tests.models import CORPUS, make_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
texts = st.text("the quickdog, 12.\n日本é👩‍🚀'sABC#▁", max_size=40) | st.text(max_size=12)


def byte_level(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer with two added tokens, and its metadata."""
    backend = make_tokenizer().backend_tokenizer
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    state = json.loads(backend.to_str())
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in state["added_tokens"]}
    return backend, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "[PAD500]"],
        "tokenizer.ggml.token_type": [*(kinds.get(token, NORMAL) for token in tokens), UNUSED],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
    }


@pytest.fixture(scope="module")
def spm() -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=model, model_type="bpe", vocab_size=400, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(oracle.get_piece_size())
    kinds = [CONTROL if oracle.is_control(i) else BYTE if oracle.is_byte(i) else NORMAL for i in ids]
    kinds[oracle.unk_id()] = UNKNOWN
    return oracle, {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [oracle.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [oracle.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": oracle.unk_id(),
        "tokenizer.ggml.bos_token_id": oracle.bos_id(),
        "tokenizer.ggml.eos_token_id": oracle.eos_id(),
    }


@given(text=texts)
@example(text="the quick dog<|end|>it's <think>12  日本")
def test_a_byte_level_vocabulary_gives_the_tokens_and_the_text_of_the_tokenizer_it_was_made_of(text):
    ids = ORACLE.encode(text).ids
    assert REBUILT.encode(text).ids == ids
    assert REBUILT.decode(ids, skip_special_tokens=False) == ORACLE.decode(ids, skip_special_tokens=False)


ORACLE, METADATA = byte_level("gpt-2")
REBUILT = read_tokenizer(METADATA)


@given(text=texts.filter(lambda text: "\0" not in text))
@example(text="  the quick dog, it's 12  日本")
def test_a_sentencepiece_vocabulary_gives_the_tokens_that_sentencepiece_gives(spm, text):
    oracle, metadata = spm
    tokenizer = read_tokenizer(metadata)
    expected = oracle.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False).ids == expected
    assert tokenizer.encode(text).ids == [oracle.bos_id(), *expected]


def test_each_digit_is_a_piece_of_its_own_where_the_model_was_trained_so():
    oracle, metadata = byte_level("smollm")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    oracle.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    text = "in 1234 the dog"
    assert read_tokenizer(metadata).encode(text).tokens == oracle.encode(text).tokens
    assert read_tokenizer(metadata).pre_tokenizer.pre_tokenize_str(text) != split.pre_tokenize_str(text)


def test_several_patterns_apply_one_after_another():
    _, metadata = byte_level("hunyuan-dense")
    text = "in 12345 日本のdog(x)"
    found = read_tokenizer(metadata).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == ["in", " ", "123", "45", " ", "日本の", "dog", "(x", ")"]


@pytest.mark.parametrize("name", sorted(SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_split_as_transformers_splits_them(name):
    assert SPLITS[name].patterns == (GGUF_PRE_TOKENIZER_SPLITS[name],)


@given(text=texts)
@example(text="the quick  dog\n\nit's 12  日本")
def test_a_vocabulary_of_gemma_4_gives_the_tokens_of_the_merges_that_it_holds(text):
    ids = GEMMA4.encode(text).ids
    assert REBUILT_GEMMA4.encode(text).ids == ids
    assert REBUILT_GEMMA4.decode(ids) == GEMMA4.decode(ids)


def gemma4() -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer as Gemma's, which has a token for each byte, and its metadata."""
    backend = Tokenizer(models.BPE(byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=tokens, show_progress=False))
    state = json.loads(backend.to_str())
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    state["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(state)), {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [BYTE] * 256 + [NORMAL] * (len(tokens) - 256),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
    }


GEMMA4, METADATA_GEMMA4 = gemma4()
REBUILT_GEMMA4 = read_tokenizer(METADATA_GEMMA4)


def test_a_token_in_front_is_added_if_the_file_asks_or_its_kind_of_vocabulary_wants_it():
    for pre, asked, expected in (
        ("gpt-2", True, 1),
        ("llama-bpe", None, 1),
        ("llama-bpe", False, 0),
        ("qwen2", None, 0),
    ):
        _, metadata = byte_level(pre)
        if asked is not None:
            metadata["tokenizer.ggml.add_bos_token"] = asked
        ids = read_tokenizer(metadata).encode("a").ids
        assert ids[:-1] == [metadata["tokenizer.ggml.bos_token_id"]] * expected


def test_special_tokens_and_those_that_end_a_turn_are_named():
    assert special_tokens(METADATA) == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokens = METADATA["tokenizer.ggml.tokens"]
    named = {tokens[i] for i in eos_token_ids(METADATA)}
    assert named == {"<|im_end|>", "<|endoftext|>", "<|end|>"}


def test_messages_of_gpt_oss_do_not_end_a_turn():
    tokens = ["<|return|>", "<|call|>", "<|end|>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [CONTROL] * 3}
    assert eos_token_ids({**metadata, "tokenizer.ggml.eos_token_id": 0}) == [0, 1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.pre": "hunyuan"}, "tokenizer.ggml.pre = 'hunyuan' is not supported: must be one of"),
        (
            {"tokenizer.ggml.model": "bert"},
            "tokenizer.ggml.model = 'bert' is not supported: must be one of gpt2, llama, gemma4",
        ),
        ({"tokenizer.ggml.model": "llama"}, "it has no tokenizer.ggml.scores"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change, named):
    with pytest.raises(UnsupportedTokenizer, match=named):
        read_tokenizer(METADATA | change)
