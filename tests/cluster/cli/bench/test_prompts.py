import random

import pytest

from cluster.cli.bench.prompts import BenchRequest, preset, random_jobs, with_prefixes
from engine.errors import InvalidParameter


def recipe(name: str, repetition: int, count: int, prompt: int, output: int) -> list[BenchRequest]:
    """A preset as other engines are given it."""
    rng = random.Random(f"{name}-{repetition}")
    return [BenchRequest([rng.randrange(10, 31000) for _ in range(prompt)], output) for _ in range(count)]


@pytest.mark.parametrize("repetition", [0, 4, 1000])
@pytest.mark.parametrize(
    ("name", "model", "shape"),
    [
        ("W1", "models/llama-160m", (64, 128, 64)),
        ("W1", "models/qwen3-0.6b/", (16, 256, 64)),
        ("W1", "qwen3/llama", (64, 128, 64)),  # the folder's own name counts
        ("W2", "models/llama-160m", (1, 128, 128)),
        ("W2", "models/qwen3-0.6b", (1, 128, 128)),
    ],
)
def test_presets_have_the_token_ids_that_every_engine_gets(name, model, shape, repetition):
    assert preset(name, model, repetition) == recipe(name, repetition, *shape)


def test_an_unknown_preset_is_an_error_that_names_the_others():
    with pytest.raises(InvalidParameter, match="W1, W2"):
        preset("W3", "pocket", 0)


def test_random_prompts_are_new_in_every_repetition_and_the_same_in_every_run():
    jobs = random_jobs(4, 16, 8, 97, seed=0, repetition=0)
    assert jobs == random_jobs(4, 16, 8, 97, seed=0, repetition=0)
    assert jobs != random_jobs(4, 16, 8, 97, seed=0, repetition=1)
    assert jobs != random_jobs(4, 16, 8, 97, seed=1, repetition=0)
    assert [(len(job.prompt), job.max_tokens) for job in jobs] == [(16, 8)] * 4
    assert all(10 <= token < 97 for job in jobs for token in job.prompt)


@pytest.mark.parametrize("vocab_size", [2, 10, 11])
def test_ids_are_below_the_vocabulary_however_small_it_is(vocab_size):
    (job,) = random_jobs(1, 100, 1, vocab_size, seed=0, repetition=0)
    assert all(0 <= token < vocab_size for token in job.prompt)


def test_prompts_of_a_group_share_a_prefix_and_nothing_else():
    prompts = with_prefixes(6, 8, 16, 2, 1000, seed=0, text=False)
    assert all(len(prompt) == 24 for prompt in prompts)
    heads = [tuple(prompt[:16]) for prompt in prompts]
    assert heads[0] == heads[2] == heads[4] != heads[1] == heads[3] == heads[5]
    assert len({tuple(prompt[16:]) for prompt in prompts}) == 6


def test_text_has_a_word_for_every_token():
    prompts = with_prefixes(4, 8, 16, 2, 1000, seed=0, text=True)
    words = [prompt.split() for prompt in prompts]
    assert all(len(prompt) == 24 for prompt in words)
    assert words[0][:16] == words[2][:16] != words[1][:16]
