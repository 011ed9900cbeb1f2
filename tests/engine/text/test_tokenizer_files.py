"""Every kind of tokenizer file: what transformers and tiktoken make of a text, and how it streams."""

from __future__ import annotations

import time
from concurrent.futures import wait
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer

from engine.errors import InvalidParameter, ModelFolderError
from engine.grammars.compiler import GrammarCompiler
from engine.model.checkpoint.identity import identity_of
from engine.text import converted_tokenizer
from engine.text.chat_tokenizer import ChatTokenizer
from engine.text.converted_tokenizer import TIKTOKEN_CLASSES
from engine.text.detokenizer import Detokenizer
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.examples import examples
from tests.tokenizer_folders import KINDS, RANKS, make_folder, save_tiktoken, write_json

REMOTE_CODE = {"kimi", "qwen"}  # their classes are Python code of the folder
texts = st.text("the quickdog, 12.\n日本é👩‍🚀'sABC#▁", max_size=40) | st.text(max_size=12)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return cache(lambda kind: make_folder(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(scope="module")
def tokenizer_of(folder_of):
    return cache(lambda kind: ChatTokenizer.from_folder(folder_of(kind)))


@pytest.fixture(scope="module")
def oracle_of(folder_of):
    return cache(lambda kind: AutoTokenizer.from_pretrained(folder_of(kind)))


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - REMOTE_CODE))
@settings(max_examples=examples(200))
@given(text=texts)
@example(text="the quick dog, it's 12  日本")
def test_a_text_has_the_tokens_that_transformers_gives(oracle_of, tokenizer_of, kind, text):
    for special in (True, False):
        expected = oracle_of(kind).encode(text, add_special_tokens=special)
        assert tokenizer_of(kind).encode(text, add_special_tokens=special) == expected


@pytest.mark.parametrize(("kind", "name"), [("kimi", "TikTokenTokenizer"), ("qwen", "QWenTokenizer")])
@settings(max_examples=examples(200))
@given(text=texts)
@example(text="the quick日本 dog, 1234 it's  日本")
def test_a_text_has_the_tokens_that_tiktoken_gives(tokenizer_of, kind, name, text):
    known = TIKTOKEN_CLASSES[name]
    oracle = tiktoken.Encoding("oracle", pat_str=known.pattern, mergeable_ranks=RANKS, special_tokens={})
    assert tokenizer_of(kind).encode(text) == oracle.encode(text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(200))
@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=8))
@example(text="the quick dog, it's 12  日本👩‍🚀.", cuts=[1, 2, 3, 5, 8])
def test_text_streamed_in_any_cuts_is_the_tokenizers_own(tokenizer_of, kind, text, cuts):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    text = assert_streams(tokenizer, ids, cuts)
    assert text.lstrip(" ") == tokenizer.decode(ids, skip_special_tokens=False).lstrip(" ")


@pytest.mark.parametrize("kind", ["byte-level", "wordpiece", "unigram", "words", "kimi", "tekken"])
@settings(max_examples=examples(200))
@given(ids=st.lists(st.integers(0, 600), max_size=20), cuts=st.lists(st.integers(0, 20), max_size=4))
def test_any_tokens_stream_as_the_tokenizer_decodes_them(tokenizer_of, kind, ids, cuts):
    assert_streams(tokenizer_of(kind), ids, cuts)


def assert_streams(tokenizer: ChatTokenizer, ids: list[int], cuts: list[int]) -> str:
    """Output goes on after a prompt, here `a`: then the first token keeps its space."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    text = "".join(detokenizer.add(ids[start:end]).text for start, end in pairwise(edges)) + detokenizer.finish()
    prompt = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(prompt, skip_special_tokens=False)
    assert before + text == tokenizer.decode(prompt + ids, skip_special_tokens=False)
    return text


def test_tokens_behind_a_tiktoken_file_have_the_names_and_flags_of_the_configuration(tokenizer_of):
    kimi, qwen, first = tokenizer_of("kimi"), tokenizer_of("qwen"), len(RANKS)
    assert [kimi.token(first + i) for i in (0, 1, 2, 255, 256)] == [
        "[BOS]", "<|reserved_token_1|>", "<|im_end|>", "<|reserved_token_255|>", None
    ]  # fmt: skip
    assert kimi.encode("a<|im_end|><think>") == [ord("a"), first + 2, first + 5]
    assert kimi.is_special(first + 1) and kimi.is_special(first + 2) and not kimi.is_special(first + 5)
    assert qwen.encode("<|endoftext|><|im_end|><|extra_204|>") == [first, first + 2, first + 207]


def test_a_tiktoken_file_without_a_class_is_split_as_transformers_does(tmp_path):
    write_json(tmp_path / "config.json", {})
    save_tiktoken(tmp_path / "tokenizer.model")
    assert ChatTokenizer.from_folder(tmp_path).encode(" the 12") == [RANKS[b" the"], ord(" "), RANKS[b"12"]]


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
def test_a_tokenizer_that_is_code_of_the_folder_is_refused_by_name(tmp_path, name):
    write_json(tmp_path / "config.json", {"model_type": "none"})
    auto_map = {"AutoTokenizer": ["mine.Mine", None]}
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "Mine", "auto_map": auto_map})
    save_tiktoken(tmp_path / name) if name == "tiktoken.model" else (tmp_path / name).write_bytes(b"\n\x07nothing")
    with pytest.raises(ModelFolderError, match=rf"{name}.*Python code, which Manta does not run; save "):
        ChatTokenizer.from_folder(tmp_path)


def test_a_file_that_cannot_be_converted_is_named_in_one_line(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff nothing")
    with pytest.raises(ModelFolderError, match=r"tokenizer\.model cannot be converted: .+") as caught:
        ChatTokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(folder_of, monkeypatch):
    monkeypatch.setattr(converted_tokenizer, "find_spec", lambda name: None)
    with pytest.raises(ModelFolderError, match=r"tokenizer\.model needs the package sentencepiece"):
        ChatTokenizer.from_folder(folder_of("spm-bpe"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_is_matched_or_refused_for_its_request_by_the_kind_of_tokenizer(folder_of, tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    compiler = GrammarCompiler(folder_of(kind), 1024, frozenset([1]))
    params = StructuredOutputsParams(choice=["the quick 日本"])
    try:
        compilation = compiler.start(params, [], time.monotonic())
        wait([compilation.compiled])
        if kind in {"wordpiece", "unigram", "words", "bert", "spm-unigram"}:
            with pytest.raises(InvalidParameter, match=r"choice .* only byte-level and byte-fallback"):
                compiler.finish(compilation)
            return
        grammar, text = compiler.finish(compilation), b""
        while not grammar.is_done:
            mask = int.from_bytes(grammar.masks(), "little")
            token = (mask & -mask).bit_length() - 1  # the lowest that is allowed
            text += tokenizer.token_bytes(token)
            grammar.accept(token)
            grammar.start_masks()
        assert text.decode() == "the quick 日本"
    finally:
        compiler.close()


def test_a_decoder_that_looks_at_neighbours_is_refused_unless_nothing_is_decoded(tmp_path):
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.CTC()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFolderError, match=r"the text of its tokens depends on their neighbours \(decoder: CTC\)"):
        ChatTokenizer.from_folder(tmp_path)
    assert ChatTokenizer.from_folder(tmp_path, decodes=False).encode("a") == [0]


def plain(tmp_path: Path, **config: object) -> ChatTokenizer:
    backend = Backend(models.BPE({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    write_json(tmp_path / "tokenizer_config.json", {**names, **config})
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    return ChatTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"4": {"content": "<x>"}}},
    ],
)
def test_what_only_the_configuration_says_holds_as_in_transformers(tmp_path, config):
    tokenizer = plain(tmp_path, **config)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("ab", "a</s>b<x>", "", "<s>"):
        assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.is_special(3) and not tokenizer.is_special(4)


def test_tokens_of_the_earlier_file_of_added_tokens_count_too(tmp_path):
    plain(tmp_path)
    write_json(tmp_path / "added_tokens.json", {"<y>": 5, "<x>": 4})
    tokenizer, oracle = ChatTokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("a<y>b<x>") == oracle.encode("a<y>b<x>") == [0, 5, 1, 4]


def test_an_added_token_with_the_id_of_another_is_refused(tmp_path):
    with pytest.raises(
        ModelFolderError, match=r"'<x>' has the id 9, but would get 4 after the tokens of tokenizer\.json"
    ):
        plain(tmp_path, added_tokens_decoder={"9": {"content": "<x>"}})


def test_ids_of_a_padded_vocabulary_are_no_text(tmp_path):
    tokenizer = plain(tmp_path)
    assert (tokenizer.token(100), tokenizer.token_bytes(100), tokenizer.decode([0, 100, 1])) == (None, b"", "ab")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer_config.json", [1], "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": 1}}, "its added tokens cannot be read"),
        (
            "tokenizer_config.json",
            {"chat_template": 5},
            "chat_template is neither a text nor a list of named templates",
        ),
    ],
)
def test_a_broken_configuration_is_named(tmp_path, name, content, problem):
    plain(tmp_path)
    write_json(tmp_path / name, content)
    with pytest.raises(ModelFolderError, match=problem):
        ChatTokenizer.from_folder(tmp_path)


def test_the_chat_template_is_found_in_every_place(tmp_path):
    assert plain(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "one of many"}]
    assert plain(tmp_path, chat_template=named).chat_template == "one of many"
    assert plain(tmp_path, chat_template="inline").chat_template == "inline"
    write_json(tmp_path / "chat_template.json", {"chat_template": "legacy"})
    assert ChatTokenizer.from_folder(tmp_path).chat_template == "legacy"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert ChatTokenizer.from_folder(tmp_path).chat_template == "jinja"


NAMED = {"default": "plain", "tool_use": "tools"}
LISTED = [{"name": name, "template": template} for name, template in NAMED.items()]


@pytest.mark.parametrize(
    ("template", "files", "expected"),
    [
        (LISTED, {}, ("plain", "tools")),
        (NAMED, {}, ("plain", "tools")),
        (LISTED[1:], {}, ("tools", "tools")),
        (LISTED[:1], {}, ("plain", "plain")),
        (LISTED, {"chat_template.jinja": "one"}, ("one", "one")),
        (None, {"chat_template.jinja": "one", "additional_chat_templates/tool_use.jinja": "two"}, ("one", "two")),
        (None, {"additional_chat_templates/tool_use.jinja": "two"}, ("two", "two")),
        (None, {"chat_template.jinja": "one", "additional_chat_templates/rag.jinja": "two"}, ("one", "one")),
    ],
)
def test_conversations_with_tools_have_the_template_for_tools(tmp_path, template, files, expected):
    plain(tmp_path, **({} if template is None else {"chat_template": template}))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert (tokenizer.template_for(None), tokenizer.template_for([{}])) == expected
    given = ChatTokenizer.from_folder(tmp_path, template="given")
    assert given.template_for([{}]) == "given", "a configured template goes before all"


def test_another_vocabulary_is_another_identity_whatever_its_file(folder_of, tmp_path):
    kinds = ["kimi", "qwen", "tekken", "gpt2", "bert", "spm-bpe", "byte-level"]
    vocabularies = {identity_of(folder_of(kind)).vocabulary for kind in kinds}
    assert len(vocabularies) == len(kinds) - 1, "Kimi's file and Qwen's are the same here"
    assert "" not in vocabularies
