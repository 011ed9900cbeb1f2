"""Edits of whole batches against the plain version, row by row, and that one against a reference in plain Python."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.runner.sampler import LogitOps, UniformSource, prepare_sampling, process_rows
from engine.wire.sampling_params import SamplingParams, ThinkingBudget
from tests.engine.runner import plain_logits_processors
from tests.engine.runner.sampling_cases import EOS, LOGITS, VOCAB, Sequence, edits, history_of, sequences, token_ids
from tests.examples import examples
from tests.late_device import LateDevice


def reference_process(logits: list[float], p: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """What should be done, token by token."""
    result = []
    for token, x in enumerate(logits):
        if p.allowed_token_ids and token not in p.allowed_token_ids:
            x = -math.inf
        for word in p.bad_words_token_ids:
            said = output[len(output) - len(word) + 1 :] if len(word) > 1 else []
            if len(output) >= len(word) - 1 and [*said, token] == word:
                x = -math.inf
        if len(output) < p.min_tokens and (token in EOS or token in p.stop_token_ids):
            x = -math.inf
        x += (p.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        count = output.count(token)
        x -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        result.append(x)
    if plain_logits_processors.must_close(p, output) and math.isfinite(result[p.thinking_budget.close]):
        return [x if token == p.thinking_budget.close else -math.inf for token, x in enumerate(result)]
    return result


def plain(sequence: Sequence) -> Tensor:
    """The logits of one sequence as the plain version changes them."""
    logits, tokens = sequence.logits.clone(), torch.tensor(sequence.tokens)
    prompt, output = tokens[: sequence.num_prompt], tokens[sequence.num_prompt :]
    plain_logits_processors.process(logits, sequence.params, prompt, output, EOS)
    return logits


def edited(batch: list[Sequence], slots: list[int]) -> Tensor:
    """The logits of all. They are prepared on a late device: while nothing sent there can be read yet, nor the newest
    token of any sequence exists."""
    staged = LateDevice().staged_copy()
    rows = [sequence.row(slot) for slot, sequence in zip(slots, batch, strict=True)]
    inputs = prepare_sampling(rows, VOCAB, UniformSource(), staged.add)
    logits = torch.stack([sequence.logits for sequence in batch])
    staged.send()
    process_rows(logits, inputs, history_of(batch, slots), LogitOps.select(logits.device))
    return logits


def process(params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    return edited([Sequence(params, 0, [*prompt, *output], len(prompt), LOGITS)], [3])[0]


@given(batch=st.lists(sequences(), min_size=1, max_size=8), order=st.randoms(use_true_random=False))
@settings(max_examples=examples(150), derandomize=True)
def test_a_batch_is_changed_bit_for_bit_as_its_rows_are_one_by_one(batch: list[Sequence], order: random.Random):
    found = edited(batch, order.sample(range(8), len(batch)))
    for row, sequence in zip(found, batch, strict=True):
        np.testing.assert_array_equal(row.numpy(), plain(sequence).numpy())


def test_more_rows_than_are_counted_at_a_time_are_counted_in_parts():
    rng = random.Random(0)
    penalties = [{"frequency_penalty": 0.3}, {"repetition_penalty": 1.7}, {"presence_penalty": -0.4}, {"min_tokens": 9}]
    batch = [
        Sequence(SamplingParams(**penalties[i % 4]), 0, [rng.randrange(VOCAB) for _ in range(6 + i)], 1 + i, LOGITS)
        for i in range(8)
    ]
    rows = [sequence.row(slot) for slot, sequence in enumerate(batch)]
    prepared = prepare_sampling(rows, VOCAB, UniformSource(), counters=2 * VOCAB + 1).edits
    assert prepared is not None and [part.where.shape[1] for part in prepared.penalties] == [2, 2, 2]
    assert torch.equal(edited(batch, list(range(8))), torch.stack([plain(sequence) for sequence in batch]))


@given(fields=edits, prompt=st.lists(token_ids, min_size=1, max_size=6), output=st.lists(token_ids, max_size=8))
@settings(max_examples=examples(150), derandomize=True)
def test_logits_are_changed_as_the_reference_does(fields, prompt, output):
    params = SamplingParams(max_tokens=None, **fields)
    expected = torch.tensor(reference_process(LOGITS.tolist(), params, prompt, output))
    torch.testing.assert_close(process(params, prompt, output), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.3},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"logit_bias": {0: 5.0, 9: -100.0}},
        {"allowed_token_ids": [1, 4, 4]},
        {"bad_words_token_ids": [[5], [3, 7], [3, 3, 8], [9, 3, 1], [2, 2, 2, 2, 2, 2]]},
        {"min_tokens": 4, "stop_token_ids": [6, 7]},
        {"thinking_budget": ThinkingBudget(3, close=7)},
        {"thinking_budget": ThinkingBudget(2, close=7, open=3)},
    ],
    ids=str,
)
def test_each_edit_alone_changes_something_and_does_what_the_reference_does(fields):
    params, prompt, output = SamplingParams(**fields), [1, 1, 9], [3, 4, 3]
    changed = process(params, prompt, output)
    assert not changed.equal(LOGITS)
    torch.testing.assert_close(changed, torch.tensor(reference_process(LOGITS.tolist(), params, prompt, output)))


def test_only_the_token_that_would_complete_a_bad_word_is_banned():
    params = SamplingParams(bad_words_token_ids=[[1, 2, 3], [3], [2, 4]])
    assert banned(process(params, [1], [2])) == {3, 4}, "the prompt does not count"
    assert banned(process(params, [0], [1, 2])) == {3, 4}
    assert banned(process(SamplingParams(bad_words_token_ids=[[1, 2, 3]]), [0], [1, 2])) == {3}
    assert banned(process(SamplingParams(bad_words_token_ids=[[1, 2, 3]]), [0], [1, 2, 2])) == set()
    assert banned(process(SamplingParams(bad_words_token_ids=[[1, 2, 3]]), [0], [2])) == set()


def test_of_two_bad_words_with_one_last_token_either_bans_it():
    words = [[1, 2, 3], [4, 3], [1, 3], [5, 6, 3]]
    for output in ([1, 2], [4], [1], [5, 6]):
        for order in (words, words[::-1]):
            assert banned(process(SamplingParams(bad_words_token_ids=order), [0], output)) == {3}
    assert banned(process(SamplingParams(bad_words_token_ids=words), [0], [2, 6])) == set()


def test_every_row_minds_its_own_bad_words():
    words = [[[1, 2, 3], [4, 5]], [[4, 6], [1, 7], [9, 1, 8]], [[2, 9], [2, 10], [0, 11]]]
    outputs = [[1, 2], [9, 1], [1, 2]]
    batch = [
        Sequence(SamplingParams(bad_words_token_ids=ids), 0, [0, *output], 1, LOGITS)
        for ids, output in zip(words, outputs, strict=True)
    ]
    assert [banned(row) for row in edited(batch, [5, 0, 2])] == [{3}, {7, 8}, {9, 10}]


def test_a_bad_word_without_tokens_bans_nothing():
    assert banned(process(SamplingParams(bad_words_token_ids=[[], [1, 2]]), [0], [1])) == {2}


def test_ends_are_banned_until_the_minimum_length():
    params = SamplingParams(min_tokens=2, stop_token_ids=[6])
    assert banned(process(params, [0, 0, 0], [1])) == {2, 6}
    assert banned(process(params, [0, 0, 0], [1, 1])) == set()


@pytest.mark.parametrize(
    ("budget", "output", "forced"),
    [
        (ThinkingBudget(3, close=7), [1, 2], False),
        (ThinkingBudget(3, close=7), [1, 2, 3], True),
        (ThinkingBudget(0, close=7), [], True),
        (ThinkingBudget(3, close=7), [1, 7, 3], False),
        (ThinkingBudget(3, close=7, call=5), [1, 5, 3], False),
        (ThinkingBudget(3, close=7, call=5), [1, 2, 3], True),
        (ThinkingBudget(3, close=7, open=6), [6, 1, 2], False),
        (ThinkingBudget(3, close=7, open=6), [6, 1, 2, 3], True),
        (ThinkingBudget(3, close=7, open=6), [1, 6, 2, 3], False),
        (ThinkingBudget(3, close=7, open=6), [6, 1, 7, 3], False),
    ],
)
def test_reasoning_that_has_spent_its_budget_can_only_end(budget, output, forced):
    found = process(SamplingParams(thinking_budget=budget), [0, 7, 6], output)
    assert banned(found) == (set(range(VOCAB)) - {7} if forced else set())
    assert found[7] == LOGITS[7]


def test_end_of_the_reasoning_waits_where_a_grammar_does_not_allow_it():
    params = SamplingParams(thinking_budget=ThinkingBudget(2, close=7), bad_words_token_ids=[[3, 7]])
    assert banned(process(params, [0], [1, 3])) == {7}
    assert banned(process(params, [0], [1, 3, 1])) == set(range(VOCAB)) - {7}


def test_a_ban_holds_against_any_bias():
    params = SamplingParams(allowed_token_ids=[1, 3], logit_bias={0: 100.0}, repetition_penalty=0.5)
    assert banned(process(params, [0], [0])) == set(range(VOCAB)) - {1, 3}


@pytest.mark.parametrize(
    ("fields", "output", "is_plain"),
    [
        ({"min_tokens": 2}, [4], False),
        ({"min_tokens": 2}, [4, 4], True),
        ({"frequency_penalty": 1.0}, [], True),
        ({"frequency_penalty": 1.0}, [4], False),
        ({"repetition_penalty": 2.0}, [], False),
    ],
    ids=str,
)
def test_a_greedy_step_is_plain_while_there_is_nothing_to_change(fields, output, is_plain):
    params = SamplingParams(temperature=0.0, **fields)
    row = Sequence(params, 0, [1, 1, 1, *output], 3, LOGITS).row(0)
    assert prepare_sampling([row], VOCAB, UniformSource()).plain == is_plain


def banned(logits: Tensor) -> set[int]:
    return set(torch.isneginf(logits).nonzero().flatten().tolist())
