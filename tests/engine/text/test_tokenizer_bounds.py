"""A tokenizer.json that anybody has written: refused in one line where it is too much, and never a crash."""

from __future__ import annotations

import base64
import os

import pytest

from engine.errors import ModelFolderError, RequestError
from engine.pooling.text_encoder import TextEncoder
from engine.text.chat_tokenizer import ChatTokenizer
from tests.tokenizer_folders import write_json

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "!": 2}, "merges": []}
WORD_PIECE = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]", "continuing_subword_prefix": ""}
FREE = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def replaced(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(key, step, count):
    return {"type": "Sequence", key: [step] * count}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(pieces, ids):
    special = {"s": {"id": "s", "ids": ids, "tokens": ["s"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": special}


def charsmap(content):
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}}


def nested(levels):
    step = {"type": "NFC"}
    for _ in range(levels):
        step = {"type": "Sequence", "normalizers": [step]}
    return {"normalizer": step}


TEXT, SPECIAL = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "s", "type_id": 0}}
TENFOLD = replaced({"String": "a"}, "a" * 10)

REFUSED = {
    "a letter becomes 10^9": ({"normalizer": sequence("normalizers", TENFOLD, 9)}, "at most 128, got 1e+09"),
    "the same by a pattern": ({"normalizer": replaced({"Regex": "a"}, "b" * 500)}, "at most 128, got 501"),
    "and in a table": (charsmap(b"\0\0\0\0" + b"x" * 500 + b"\0"), "at most 128, got 500"),
    "a long replacement": ({"normalizer": replaced({"String": "a"}, "b" * 10**6)}, "of content must be at most 1,024"),
    "a long prefix": ({"normalizer": {"type": "Prepend", "prepend": "b" * 10**6}}, "of prepend must be at most 1,024"),
    "an answer that grows": ({"decoder": sequence("decoders", TENFOLD, 9)}, "its decoder makes of one"),
    "an answer that is cut": ({"decoder": {"type": "Strip", "content": "a", "start": 2**40, "stop": 0}}, "start must"),
    "many steps": ({"normalizer": sequence("normalizers", {"type": "NFKD"}, 5000)}, "at most 32, got 5,001"),
    "deep steps": (nested(40), "levels of its steps must be at most 16"),
    "many tokens around a text": ({"post_processor": template([SPECIAL] * 100, [1])}, "at most 64, got 100"),
    "a special token of many": ({"post_processor": template([SPECIAL, TEXT], [1] * 1000)}, "at most 64, got 1,001"),
    "special tokens of another form": ({"post_processor": template([{}], [1])}, "another form"),
    "a table that ends behind it": (charsmap(b"\xff\xff\xff\xff\0\0\0\0"), "a trie within its 8 bytes"),
    "no table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "ä"}}, "cannot be read"),
    "a table with a bad trie": (charsmap(b"\x04\0\0\0\xff\xff\xff\xff\0"), "cannot be read"),
    "a long pattern": ({"pre_tokenizer": split("(" * 10**5 + ")" * 10**5)}, "of a pattern must be at most 16,384"),
    "pieces of length 0": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "its tokenizer cannot be read"),
    "a long token": ({"model": BPE | {"vocab": {"a": 0, "b" * 2000: 1}}}, "of a token must be at most 1,024"),
    "a long added token": ({"added_tokens": [{"id": 3, "content": "c" * 2000, **FREE}]}, "of a token must be"),
    "long words": ({"model": WORD_PIECE | {"max_input_chars_per_word": 10**9}}, "max_input_chars_per_word must be"),
    "no token for what is unknown": ({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}}, "Missing"),
    "a prefix that no token has": (
        {"model": BPE | {"continuing_subword_prefix": "#" * 9, "merges": [["a", "b"]]}},
        "tokenizer.json cannot be read",
    ),
    "an id that is none": ({"model": BPE | {"vocab": {"a": 1.5}}}, "Expected `int`"),
    "a model that is none": ({"model": []}, "Expected `object`"),
}


def folder(tmp_path, **changed):
    write_json(tmp_path / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": BPE, **changed})
    return tmp_path


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hostile_tokenizer_is_refused_in_one_line(tmp_path, kind):
    changed, reason = REFUSED[kind]
    with pytest.raises(ModelFolderError) as refused:
        ChatTokenizer.from_folder(folder(tmp_path, **changed))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_that_is_nested_deeper_than_anything_reads_is_refused(tmp_path):
    deep = '{"normalizers": [' * 100_000 + "]}" * 100_000
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "normalizer": ' + deep + "}")
    with pytest.raises(ModelFolderError, match="nested too deeply"):
        ChatTokenizer.from_folder(tmp_path)


def test_a_tokenizer_that_is_a_pipe_or_larger_than_any_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 200 << 20)
    with pytest.raises(ModelFolderError, match="at most 134,217,728 bytes"):
        ChatTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is missing"):
        ChatTokenizer.from_folder(tmp_path)


def test_a_file_that_pads_and_truncates_every_text_is_read_without_both(tmp_path):
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 0}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 10}
    tokenizer = ChatTokenizer.from_folder(folder(tmp_path, padding=padding, truncation=truncation))
    assert tokenizer.encode("ab" * 10) == [0, 1] * 10


@pytest.mark.parametrize(
    "part", [{"pre_tokenizer": split("(a+)+$")}, {"normalizer": replaced({"Regex": "(a+)+$"}, "")}]
)
def test_a_pattern_that_takes_too_long_ends_one_request_with_its_reason(tmp_path, part):
    tokenizer = ChatTokenizer.from_folder(folder(tmp_path, **part))
    text = "a" * 40 + "!"
    for call in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_prompt(text, 1000),
        lambda: tokenizer.count_before(text, [1], True),
        lambda: TextEncoder(tokenizer).encode([text]),
        lambda: tokenizer.bad_words_token_ids([text]),
    ):
        with pytest.raises(RequestError, match=r"the model's tokenizer fails with this text: .*retry-limit") as failed:
            call()
        assert failed.value.status == 400
    assert tokenizer.encode("ab")  # the next one
