"""Sampling against exact distributions and against references in plain Python."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model.ops import sampling
from engine.model.ops.logits.masks import apply_masks_plain
from engine.model.ops.sampling import CANDIDATES, RandomRows, draw, draw_filtered, draw_sorted
from engine.runner.sampler import (
    SampledRow,
    SamplingInputs,
    UniformSource,
    logprob_table,
    prepare_sampling,
)
from engine.wire.plan import ALL_TOKENS_BANNED
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenLogprob
from tests.engine.parts.edited_logits import edited
from tests.engine.runner.sampling_cases import (
    FILTERS,
    LOGITS,
    VOCAB,
    Sequence,
    logit_rows,
    sequences,
    token_ids,
)
from tests.examples import examples

DRAWS = 8000
SAMPLE_ROWS = sampling.select(torch.device("cpu"))


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    return SAMPLE_ROWS(logits, inputs.random)


def exact_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Probability of each token, by the definitions."""
    scaled = [x / params.temperature for x in logits]
    most = max(scaled)
    weights = {token: math.exp(x - most) for token, x in enumerate(scaled)}
    weights = {token: w for token, w in weights.items() if w >= params.min_p * max(weights.values())}
    if params.top_k > 0:
        weights = dict(sorted(weights.items(), key=lambda item: -item[1])[: params.top_k])
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for token, w in sorted(weights.items(), key=lambda item: -item[1]):
        if sum(kept.values()) < params.top_p * total:
            kept[token] = w
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logits))]


def check_frequencies(tokens: Tensor, probabilities: list[float]) -> None:
    """Pearson's chi-square test. Seeds are fixed, so this passes always or never."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = torch.tensor(probabilities, dtype=torch.float64) * len(tokens)
    assert counts[expected == 0].sum() == 0, "a token that was filtered out"
    possible = expected > 0
    assert expected[possible].min() > 5, "too few draws for the test"
    if possible.sum() > 1:
        chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        freedom = (possible.sum() - 1).double()
        p_value = torch.special.gammaincc(freedom / 2, chi_square / 2).item()
        assert p_value > 0.005, (counts, expected)


def uniforms(count: int) -> Tensor:
    """[count, 1], from many seeds and positions."""
    source = UniformSource()
    return torch.tensor([[source.draw(seed % 89, seed // 89)] for seed in range(count)])


@pytest.fixture(scope="module")
def many_uniforms() -> Tensor:
    return uniforms(DRAWS)


def random_rows(params: SamplingParams, uniform: Tensor, width: int) -> RandomRows:
    def column(value: float) -> Tensor:
        return torch.full((len(uniform), 1), value)

    temperature, top_p, min_p = column(params.temperature), column(params.top_p), column(params.min_p)
    return RandomRows(torch.arange(len(uniform)), temperature, uniform, top_p, min_p, width)


# -- random numbers --------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
@settings(max_examples=examples(200), derandomize=True)
def test_a_number_is_the_first_that_numpys_philox_gives_for_this_key_and_counter(seed, position):
    source = UniformSource()
    source.draw(3, 4)  # whatever it did before does not matter
    key = np.array([seed, 0], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    assert source.draw(seed, position) == (bits >> 40) / 2**24


def test_numbers_are_uniform_over_seeds_over_positions_and_over_both():
    source = UniformSource()
    cases = {
        "seeds": [(seed, 7) for seed in range(DRAWS)],
        "positions": [(12345, position) for position in range(DRAWS)],
        "both": [(i, i) for i in range(DRAWS)],
    }
    for pairs in cases.values():
        values = torch.tensor([source.draw(*pair) for pair in pairs])
        assert values.min() >= 0 and values.max() < 1
        check_frequencies((values * 20).long(), [1 / 20] * 20)
        following = (values[:-1] * 4).long() * 4 + (values[1:] * 4).long()
        check_frequencies(following[::2], [1 / 16] * 16)  # neighbours tell nothing of each other


# -- distributions ---------------------------------------------------------------------------------------------


def test_draw_picks_in_proportion_to_the_weights(many_uniforms):
    weights = torch.tensor([0.0, 1.0, 4.0, 0.0, 0.5, 2.5, 0.0])
    tokens = draw(weights.expand(DRAWS, -1), many_uniforms)
    check_frequencies(tokens, (weights / weights.sum()).tolist())


@pytest.mark.parametrize(
    "weights", [[0.0, 3.0, 0.0, 1.0, 0.0], [1e-30, 1e-30], [1e-45, 0.0], [0.1] * 10 + [0.0], [1.0]]
)
def test_draw_never_picks_weight_zero_even_at_the_ends_of_the_range(weights):
    possible = {i for i, w in enumerate(weights) if w}
    ends = torch.tensor([[0.0], [2.0**-24], [0.75], [1 - 2.0**-24]])
    tokens = draw(torch.tensor(weights).expand(len(ends), -1), ends).tolist()
    assert tokens[0] == min(possible)
    assert tokens[-1] == max(possible)
    assert set(tokens) <= possible


@pytest.mark.parametrize("fields", FILTERS.values(), ids=FILTERS)
def test_draw_filtered_follows_the_exact_distribution(fields, many_uniforms):
    params = SamplingParams(**fields)
    width = params.top_k if params.top_k else VOCAB
    group = random_rows(params, many_uniforms, width)
    tokens = draw_filtered((LOGITS / params.temperature).expand(DRAWS, -1), group)
    check_frequencies(tokens, exact_distribution(LOGITS.tolist(), params))


@pytest.mark.parametrize("fields", FILTERS.values(), ids=FILTERS)
def test_sample_follows_the_exact_distribution(fields):
    params = SamplingParams(**fields)
    rows = [SampledRow(position=i // 89, seed=i % 89, params=params) for i in range(DRAWS)]
    tokens = sample(LOGITS.repeat(DRAWS, 1), prepare_sampling(rows, VOCAB, UniformSource()))
    check_frequencies(tokens, exact_distribution(LOGITS.tolist(), params))


def test_one_group_holds_rows_with_different_temperatures_top_p_and_min_p():
    kinds = [
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.3, temperature=0.7),
        SamplingParams(top_p=0.95, min_p=0.02, temperature=1.5),
    ]
    rows = [SampledRow(i // 89, i % 89, kinds[i % 3]) for i in range(3 * DRAWS)]
    inputs = prepare_sampling(rows, VOCAB, UniformSource())
    assert len(inputs.random) == 1
    tokens = sample(LOGITS.repeat(3 * DRAWS, 1), inputs)
    for i, params in enumerate(kinds):
        check_frequencies(tokens[i::3], exact_distribution(LOGITS.tolist(), params))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"top_k": 1, "temperature": 2.0},
        {"top_p": 1e-9, "temperature": 2.0},
        {"top_p": 1e-60},  # 0 in float32
        {"min_p": 1.0, "temperature": 2.0},
    ],
    ids=str,
)
def test_parameters_that_leave_one_candidate_give_the_greedy_token(fields):
    logits = torch.randn(500, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(500), torch.arange(500) % VOCAB] += 4.0  # a clear best, as 1e-6 counts as 1e-2
    rows = [SampledRow(i, i, SamplingParams(**fields)) for i in range(500)]
    tokens = sample(logits.clone(), prepare_sampling(rows, VOCAB, UniformSource()))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_a_row_that_asked_for_a_seed_repeats_it_and_another_position_gives_another_number():
    def tokens(seed: int) -> list[int]:
        rows = [SampledRow(i, seed, SamplingParams()) for i in range(50)]
        return sample(torch.zeros(50, VOCAB), prepare_sampling(rows, VOCAB, UniformSource())).tolist()

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert len(set(tokens(1))) > VOCAB // 2


# -- batches ---------------------------------------------------------------------------------------------------


def run_batch(sequences: list[Sequence], slots: list[int]) -> list[int]:
    inputs = prepare_sampling([sequence.row for sequence in sequences], VOCAB, UniformSource())
    return sample(edited(sequences, slots), inputs).tolist()


@given(batch=st.lists(sequences(), min_size=1, max_size=8), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(120), derandomize=True)
def test_a_row_gets_the_same_token_whatever_it_is_batched_with(batch: list[Sequence], order: random.Random):
    slots = order.sample(range(8), len(batch))
    together = run_batch(batch, slots)
    alone = [run_batch([sequence], [order.randrange(8)])[0] for sequence in batch]
    assert together == alone


def test_a_greedy_batch_prepares_nothing_and_draws_no_number():
    class NoNumbers(UniformSource):
        def draw(self, seed: int, position: int) -> float:
            raise AssertionError("a greedy row has no use for a random number")

    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    inputs = prepare_sampling([SampledRow(5, i, params) for i in range(6)], VOCAB, NoNumbers())
    assert (inputs.random, inputs.logprobs) == ([], None)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    assert sample(logits, inputs).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, *FILTERS.values()], ids=str)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_row_without_a_finite_best_logit_says_why_and_leaves_the_others_alone(fields, broken):
    rows = [SampledRow(i, i, SamplingParams(**fields)) for i in range(3)]
    inputs = prepare_sampling(rows, VOCAB, UniformSource())
    logits = LOGITS.repeat(3, 1)
    expected = sample(logits.clone(), inputs).tolist()
    logits[1] = broken
    why = ALL_TOKENS_BANNED if broken == -torch.inf else -1
    assert sample(logits, inputs).tolist() == [expected[0], why, expected[2]]
    one_nan = LOGITS.repeat(3, 1)
    one_nan[1, 5] = torch.nan
    assert sample(one_nan, inputs).tolist() == [expected[0], -1, expected[2]]


# -- log-probabilities -----------------------------------------------------------------------------------------


def token_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[TokenLogprob]:
    return logprob_table(logits, tokens, max(counts)).rows(counts)


@given(rows=st.lists(st.tuples(logit_rows, token_ids, st.integers(0, VOCAB)), min_size=1, max_size=6))
@settings(max_examples=examples(100), derandomize=True)
def test_log_probabilities_ranks_and_top_lists_equal_a_plain_reference(rows):
    # a small slope, so that no two logits are equal and their order is known
    values = [[x / 4 + i * 0.01 for i, x in enumerate(row)] for row, _, _ in rows]
    tokens, counts = [token for _, token, _ in rows], [count for _, _, count in rows]
    entries = token_logprobs(torch.tensor(values), torch.tensor(tokens), counts)
    assert [entry.token_id for entry in entries] == tokens
    for row, token, count, entry in zip(values, tokens, counts, entries, strict=True):
        norm = math.log(sum(math.exp(x) for x in row))
        order = sorted(range(VOCAB), key=lambda i: -row[i])
        assert entry.logprob == pytest.approx(row[token] - norm, abs=1e-5)
        assert entry.rank == order.index(token) + 1
        assert [top_id for top_id, _ in entry.top] == order[:count]
        assert [value for _, value in entry.top] == pytest.approx([row[i] - norm for i in order[:count]], abs=1e-5)


def test_no_alternatives_are_reported_where_none_were_asked_for():
    (entry,) = token_logprobs(LOGITS[None], torch.tensor([3]), [0])
    assert entry.top == []
    assert entry.logprob == pytest.approx(LOGITS.log_softmax(-1)[3].item())
    assert entry.rank == 4


def test_more_alternatives_than_the_vocabulary_has_are_all_of_it():
    (entry,) = token_logprobs(LOGITS[None], torch.tensor([3]), [20])
    assert len(entry.top) == VOCAB


def test_equally_likely_tokens_share_the_better_rank():
    entries = token_logprobs(torch.tensor([[1.0, 3.0, 1.0, 0.0]] * 2), torch.tensor([0, 2]), [0, 0])
    assert [entry.rank for entry in entries] == [2, 2]


@pytest.mark.parametrize(
    "logits", [torch.randn(3, 5000).bfloat16().float(), torch.tensor([[0.0, -0.0, -1.0, 0.0] * 9])]
)
def test_of_equal_logits_the_lower_ids_come_first_in_lists_of_any_length(logits):
    best = logits.max(-1).indices  # what is sampled where the most likely one is
    for width in (1, 2, 7, 20):
        for row, entry in zip(logits.tolist(), token_logprobs(logits, best, [width] * len(best)), strict=True):
            assert [top_id for top_id, _ in entry.top] == sorted(range(len(row)), key=lambda i: -row[i])[:width]
            assert (entry.top[0][0], entry.rank) == (entry.token_id, 1)


@settings(max_examples=40, derandomize=True)
@given(
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    seed=st.integers(0, 1000),
)
def test_looking_at_the_likeliest_candidates_first_equals_sorting_the_whole_vocabulary(spread, top_p, min_p, seed):
    """With a vocabulary several times CANDIDATES, flat and peaked."""
    logits = torch.randn(4, 3 * CANDIDATES, generator=torch.Generator().manual_seed(seed)) * spread
    params = SamplingParams(top_p=top_p, min_p=min_p)
    rows = [SampledRow(7, seed + i, params) for i in range(4)]
    for group in prepare_sampling(rows, logits.shape[-1], UniformSource()).random:
        if group.width:
            assert torch.equal(draw_filtered(logits, group), draw_sorted(logits, group))


def test_drawing_a_few_rows_at_a_time_gives_the_tokens_that_all_at_once_have(monkeypatch):
    """With greedy rows among them, rows that are sorted after all, and equal logits."""
    vocab_size = 2 * CANDIDATES
    logits = (torch.randn(23, vocab_size, generator=torch.Generator().manual_seed(1)) / 10).bfloat16().float()
    fields: list[dict[str, float]] = [{"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.0}]
    rows = [SampledRow(7, i, SamplingParams(**fields[i % 4])) for i in range(len(logits))]  # type: ignore[arg-type]
    inputs = prepare_sampling(rows, vocab_size, UniformSource())
    drawn = []
    for at_once in (2, 3, 23):
        monkeypatch.setattr(sampling, "CACHED", at_once * vocab_size)
        drawn.append(sample(logits, inputs).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("vocab", [1, 8, 31, 97, 128])
def test_a_mask_leaves_the_tokens_whose_bits_are_set_and_other_rows_alone(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator)
    words = torch.randint(0, 256, (2, -(-vocab // 32) * 4), generator=generator).byte()
    masked = logits.clone()
    apply_masks_plain(masked, torch.tensor([3, 1]), words)
    expected = logits.clone()
    for row, bits in zip((3, 1), words.tolist(), strict=True):
        for token in range(vocab):
            if not bits[token // 8] >> token % 8 & 1:
                expected[row, token] = -torch.inf
    assert torch.equal(masked, expected)
