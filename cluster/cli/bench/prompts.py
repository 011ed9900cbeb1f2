"""Prompts for measurements. A prompt depends only on the arguments, so that different engines and runs get the same
prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InvalidParameter

if TYPE_CHECKING:  # numpy
    from cluster.lab.simulator.trace import Trace

WARM_UP = 1000  # number of the first warm-up repetition
FIRST_ID = 10  # ids below are special tokens in many vocabularies
PRESET_IDS = 31000  # presets draw ids from [FIRST_ID, PRESET_IDS)
PRESETS = ("W1", "W2")
WORDS = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot word "
    "but what some we can out other were all there when up use your how said an each she which do their time if will "
    "way about many then them write would like so these her long make thing see him two has look more day could go "
    "come did number sound no most people my over know water than call first who may down side been now find"
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt in token ids, and the number of tokens to generate."""

    prompt: list[int]
    max_tokens: int


def preset(name: str, model: str, repetition: int) -> list[BenchRequest]:
    """Return a workload for comparisons with other engines. Token ids depend only on name and repetition.

    W1, throughput: 64 requests at once, of 128 tokens in and 64 out; for a Qwen3 model 16 requests of 256 in and 64
    out. W2, one stream: 128 tokens in, 128 out.
    """
    rng = random.Random(f"{name}-{repetition}")
    if name == "W1":
        count, length, output = (16, 256, 64) if "qwen3" in Path(model).name else (64, 128, 64)
    elif name == "W2":
        count, length, output = 1, 128, 128
    else:
        raise InvalidParameter("workload", name, f"one of {', '.join(PRESETS)}")
    return [BenchRequest(random_ids(rng, length, PRESET_IDS), output) for _ in range(count)]


def random_jobs(
    count: int, input_len: int, output_len: int, vocab_size: int, seed: int, repetition: int
) -> list[BenchRequest]:
    rng = random.Random(f"{seed}-{repetition}")
    return [BenchRequest(random_ids(rng, input_len, vocab_size), output_len) for _ in range(count)]


def random_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    first = min(FIRST_ID, vocab_size - 1)
    return [rng.randrange(first, vocab_size) for _ in range(count)]


def trace_prompts(trace: Trace, vocab_size: int, seed: int) -> Iterator[list[int]]:
    """Yield a prompt of random ids for each request of a trace. Prompts begin alike as far as the trace says so."""
    rng, known = random.Random(seed), dict[int, list[int]]()

    def ids_of(piece: int, count: int) -> list[int]:
        if len(known.get(piece, ())) < count:  # more ids of a piece begin with those that are known
            known[piece] = random_ids(random.Random(f"{seed}-{piece}"), count, vocab_size)
        return known[piece][:count]

    for index, length in enumerate(trace.prompt_tokens.tolist()):
        if trace.hash_ids is None:
            yield random_ids(rng, length, vocab_size)
        else:
            yield [token for piece, count in trace.pieces(index) for token in ids_of(piece, count)]


def random_words(rng: random.Random, count: int) -> list[str]:
    """Draw common English words, each about one token in most vocabularies."""
    return rng.choices(WORDS.split(), k=count)


def with_prefixes(
    count: int, input_len: int, prefix_len: int, prefix_groups: int, vocab_size: int, seed: int, *, text: bool
) -> Sequence[list[int] | str]:
    """Return prompts of `input_len` tokens after a prefix of `prefix_len` tokens that all prompts of a group share.

    Groups alternate: prompt i begins with prefix i modulo `prefix_groups`. text: whether to return words instead of
    token ids; prompt lengths are then approximate.
    """
    rng = random.Random(seed)
    if text:
        prefixes = [random_words(rng, prefix_len) for _ in range(prefix_groups)]
        return [" ".join(prefixes[i % prefix_groups] + random_words(rng, input_len)) for i in range(count)]
    ids = [random_ids(rng, prefix_len, vocab_size) for _ in range(prefix_groups)]
    return [ids[i % prefix_groups] + random_ids(rng, input_len, vocab_size) for i in range(count)]
