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

from engine.parts.logits_processors.rank.batch_edits import RowEdits, prepare
from engine.parts.logits_processors.rank.logits_edits import LogitsEdits
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.plan import NewSequence
from engine.wire.sampling_params import SamplingParams
from tests.engine.parts import plain_edits
from tests.engine.parts.edited_logits import banned, edited, edits_of, process
from tests.engine.runner.sampling_cases import EOS, LOGITS, VOCAB, Sequence, edits, sequences, token_ids
from tests.examples import examples


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
    budget = ThinkingBudget.of(p)
    if plain_edits.must_close(budget, output) and math.isfinite(result[budget.close]):
        return [x if token == budget.close else -math.inf for token, x in enumerate(result)]
    return result


def plain(sequence: Sequence) -> Tensor:
    """The logits of one sequence as the plain version changes them."""
    logits, tokens = sequence.logits.clone(), torch.tensor(sequence.tokens)
    prompt, output = tokens[: sequence.num_prompt], tokens[sequence.num_prompt :]
    plain_edits.process(logits, sequence.params, prompt, output, EOS)
    return logits


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
    new = [NewSequence(i, each.tokens, each.num_prompt, each.params, each.seed) for i, each in enumerate(batch)]
    rows = [RowEdits(i, i, len(each.tokens), LogitsEdits.of(each, EOS)) for i, each in enumerate(new)]
    prepared = prepare(rows, VOCAB, torch.from_numpy, counters=2 * VOCAB + 1)
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


def test_a_ban_holds_against_any_bias():
    params = SamplingParams(allowed_token_ids=[1, 3], logit_bias={0: 100.0}, repetition_penalty=0.5)
    assert banned(process(params, [0], [0])) == set(range(VOCAB)) - {1, 3}


@pytest.mark.parametrize(
    ("fields", "output", "is_left"),
    [
        ({"min_tokens": 2}, [4], False),
        ({"min_tokens": 2}, [4, 4], True),
        ({"frequency_penalty": 1.0}, [], True),
        ({"frequency_penalty": 1.0}, [4], False),
        ({"repetition_penalty": 2.0}, [], False),
    ],
    ids=str,
)
def test_logits_are_left_alone_while_there_is_nothing_to_change(fields, output, is_left):
    sequence = Sequence(SamplingParams(**fields), 0, [1, 1, 1, *output], 3, LOGITS)
    assert (edits_of([sequence], [0]) == []) == is_left
