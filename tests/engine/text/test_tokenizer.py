from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

import engine.pocket
from engine.errors import ModelFolderError, PromptTooLong, RequestError
from engine.pooling.text_encoder import TextEncoder
from engine.text.chat_tokenizer import ChatTokenizer
from engine.text.tokenizer import Tokenizer
from tests.models import make_tokenizer

POCKET = Path(engine.pocket.__file__).parent / "model"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé 👩‍🚀?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return ChatTokenizer.from_folder(folder)


def test_chat_template_gives_the_ids_that_transformers_gives(folder, tokenizer):
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(CHAT, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(CHAT) == expected["input_ids"]


@given(text=st.text())
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_special_token_is_told_from_text(tokenizer):
    (token,) = tokenizer.encode("<|im_end|>")
    assert tokenizer.is_special(token)
    assert not tokenizer.is_special(tokenizer.encode("a")[0])


def test_unknown_token_id_has_no_bytes(tokenizer):
    assert tokenizer.token_bytes(10**6) == b""


def test_byte_fallback_tokens_have_the_bytes_they_stand_for(tmp_path):
    vocab = {"<unk>": 0, "▁the": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert b"".join(tokenizer.token_bytes(i) for i in (1, 2, 3, 4)).decode() == " the€"


def test_a_token_with_characters_outside_the_byte_alphabet_stands_for_its_own_text(tmp_path):
    backend = Backend(models.BPE({"a": 0, "Ġb": 1, "▁the": 2, "日本": 3}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert [tokenizer.token_text(i) for i in range(4)] == ["a", " b", "▁the", "日本"]
    assert tokenizer.token_text(3) == tokenizer.decode([3]), "as `tokenizers` has it"


def test_bad_word_is_banned_with_and_without_a_space_before_it(tokenizer):
    assert tokenizer.bad_words_token_ids(["dog"]) == [tokenizer.encode("dog"), tokenizer.encode(" dog")]


def test_folder_without_a_chat_template_refuses_chats(folder, tmp_path):
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with pytest.raises(RequestError, match="has no chat template"):
        ChatTokenizer.from_folder(tmp_path).apply_chat_template(CHAT)


def test_refusal_by_the_chat_template_is_the_users_error(folder, tmp_path):
    shutil.copy(folder / "tokenizer.json", tmp_path)
    template = "{{ raise_exception('no system turns') if messages[0].role == 'system' }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(RequestError, match="no system turns") as caught:
        ChatTokenizer.from_folder(tmp_path).apply_chat_template(CHAT)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("content", [None, "{", '{"model": 1}'])
def test_missing_or_broken_tokenizer_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json"):
        ChatTokenizer.from_folder(tmp_path)


def test_importing_the_tokenizer_does_not_import_torch():
    code = "import sys, engine.text.tokenizer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(text=st.text() | st.text(alphabet="a \n<|im_endé'1", max_size=300))
def test_token_ids_are_those_of_the_backends_own_encode(tokenizer, text):
    for special in (True, False):
        expected = tokenizer.backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == expected
        assert tokenizer.encode_prompt(text, 10_000, add_special_tokens=special) == expected


@given(token_ids=st.lists(st.integers(0, 300)))
def test_text_of_tokens_is_that_of_the_backends_own_decode(tokenizer, token_ids):
    for skip in (True, False):
        expected = tokenizer.backend.decode(token_ids, skip_special_tokens=skip)
        assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected


def longest_hold_s(work: Callable[[], object]) -> float:
    """Run `work` in a thread, and return the longest time that this one had to wait for the GIL."""
    with ThreadPoolExecutor(1) as threads:
        future, last, longest = threads.submit(work), time.perf_counter(), 0.0
        while not future.done():
            time.sleep(0.001)
            now = time.perf_counter()
            last, longest = now, max(longest, now - last)
        future.result()
    return longest


def test_long_text_is_tokenized_without_holding_the_gil():
    tokenizer = ChatTokenizer.from_folder(POCKET)
    text = "The quick brown fox jumps over the lazy dog, and 12 more. " * 20_000

    def lets_go() -> bool:
        held = longest_hold_s(lambda: tokenizer.encode(text))
        started = time.perf_counter()
        tokenizer.backend.encode(text)
        return held < (time.perf_counter() - started) / 4

    assert any(lets_go() for _ in range(5)), "what else runs here may hold up any one of them"


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Strip()])
def test_text_that_cannot_fit_is_refused_by_its_length(folder, tmp_path, normalizer):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    longest = max(len(tokenizer.token_bytes(i)) for i in range(backend.get_vocab_size()))
    factor = 1 if normalizer is None else 3
    if isinstance(normalizer, normalizers.Strip):  # a text of any length may become nothing
        assert tokenizer.max_token_bytes is None
        assert tokenizer.encode_prompt(" " * 10**6, 10, add_special_tokens=False) == []
        return
    assert tokenizer.max_token_bytes == longest * factor
    tokenizer.check_length("a" * (10 * longest * factor - 1), 10)
    with pytest.raises(
        PromptTooLong,
        match=r": 10 tokens > 9 maximum .counted no further; this model's maximum context length is 10 tokens",
    ):
        tokenizer.check_length("a" * (10 * longest * factor), 10)


@given(text=st.text())
def test_no_text_that_fits_is_refused_by_its_length(tokenizer, text):
    tokenizer.check_length(text, len(tokenizer.encode(text, add_special_tokens=False)) + 1)


def test_split_that_drops_text_leaves_no_bound(tmp_path):
    steps = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend = Backend(models.BPE({"a": 0}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert ChatTokenizer.from_folder(tmp_path).max_token_bytes is None


@pytest.mark.parametrize("kind", ["bert", "roberta", "template", "none"])
@given(first=st.text("ab c", min_size=1), second=st.text("ab c"), max_tokens=st.none() | st.integers(6, 12))
def test_parts_that_are_tokenized_apart_join_to_what_the_tokenizer_makes_of_the_pair(kind, first, second, max_tokens):
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "[CLS]": 2, "[SEP]": 3, "[UNK]": 4}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = [("[CLS]", 2), ("[SEP]", 3)]
    processor = {
        "bert": processors.BertProcessing(special[1], special[0]),
        "roberta": processors.RobertaProcessing(special[1], special[0]),
        "template": processors.TemplateProcessing("[CLS] $A", "[CLS] $A [SEP] $B:1 [SEP]:1", special),
        "none": None,
    }[kind]
    if processor is not None:
        backend.post_processor = processor
    encoder = TextEncoder(Tokenizer(backend))
    parts = [encoder.encode_parts([text], max_tokens)[0] for text in (first, second)]
    joined, typed_from = encoder.join_pair(*parts, max_tokens)
    if max_tokens is not None:
        backend.enable_truncation(max_tokens, strategy="longest_first")
    whole = backend.encode_batch_fast([(first, second)])[0]
    assert joined == whole.ids and typed_from == (whole.type_ids.index(1) if 1 in whole.type_ids else None)
