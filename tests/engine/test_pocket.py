"""The demo model is whole, small and knows everyday words; the dictionary's own functions."""

import json

import pytest

from engine.pocket import PATH
from tools.pocket.dictionary import Entry, article, is_countable, plural, sentence, trim_gloss
from tools.pocket.evaluate import Pocket

KEY_WORDS = {
    "What is an ocean?": "water",
    "What is a dog?": "canis",
    "Define computer.": "machine",
    "What does pizza mean?": "cheese",
    "what is a guitar": "strings",
    "Tell me about the piano.": "keys",
    "What is a hospital?": "patients",
    "What does it mean to swim?": "water",
    "What does happy mean?": "joy",
    "What is a teacher?": "teaching",
}


@pytest.fixture(scope="module")
def pocket() -> Pocket:
    return Pocket(PATH)


def test_pocket_knows_at_least_eight_of_ten_everyday_words(pocket):
    answers = dict(zip(KEY_WORDS, pocket.answer(list(KEY_WORDS)), strict=True))
    wrong = {question: answers[question] for question, key in KEY_WORDS.items() if key not in answers[question].lower()}
    assert len(wrong) <= 2, wrong


def test_pocket_knows_them_under_a_system_prompt_too(pocket):
    answers = pocket.answer(list(KEY_WORDS), system="You are a helpful assistant.")
    assert sum(key in answer.lower() for key, answer in zip(KEY_WORDS.values(), answers, strict=True)) >= 8


def test_pocket_introduces_itself_and_admits_what_it_does_not_know(pocket):
    who, unknown = pocket.answer(["Who are you?", "What is a zorpflim?"])
    assert "Pocket" in who and "Manta" in who
    assert unknown.startswith("I do not know the word")


def test_chat_template_is_chatml(pocket):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ocean"}]
    text = pocket.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nocean<|im_end|>\n<|im_start|>assistant\n"
    )


def test_model_folder_is_small_and_divides_by_tensor_parallel_four():
    config = json.loads((PATH / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (
        config["num_attention_heads"] % 4 == config["num_key_value_heads"] % 4 == config["intermediate_size"] % 4 == 0
    )
    assert sum(file.stat().st_size for file in PATH.iterdir()) <= 20 * 1024**2


@pytest.mark.parametrize(
    ("word", "expected"),
    [("dog", "a"), ("ocean", "an"), ("hour", "an"), ("university", "a"), ("umbrella", "an"), ("unicorn", "a")],
)
def test_article_follows_the_sound(word, expected):
    assert article(word) == expected


@pytest.mark.parametrize(("noun", "expected"), [("dog", "dogs"), ("box", "boxes"), ("city", "cities"), ("key", "keys")])
def test_plural(noun, expected):
    assert plural(noun) == expected


@pytest.mark.parametrize(
    ("gloss", "expected"),
    [
        ('a male parent; "his father was born in Atlanta"', "a male parent"),
        ("a large body of water (salt water); the sea", "a large body of water"),
        ("move quickly", "move quickly"),
        ("x", None),
        ("word " * 30, None),
    ],
)
def test_trim_gloss_keeps_the_first_short_clause(gloss, expected):
    assert trim_gloss(gloss) == expected


def test_mass_nouns_take_no_article():
    assert is_countable("dog", 5)
    assert not is_countable("music", 10)
    assert not is_countable("happiness", 26)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (Entry("ocean", "n", "a large body of water", countable=True), "An ocean is a large body of water."),
        (Entry("music", "n", "an art"), "Music is an art."),
        (Entry("sun", "n", "the star near us", countable=True), "The sun is the star near us."),
        (Entry("swim", "v", "travel through water"), "To swim is to travel through water."),
        (Entry("happy", "a", "marked by joy"), "Happy means marked by joy."),
    ],
)
def test_answers_are_sentences(entry, expected):
    assert sentence(entry) == expected
