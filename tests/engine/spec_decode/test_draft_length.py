from __future__ import annotations

import pytest

from engine.spec_decode.draft_length import OPTIMISM, SequenceDrafts, StepDrafts


def best_length(acceptance: float, fixed: float, slope: float, sequences: int, limit: int) -> int:
    """The length at which one sequence's drafts make the step yield most per second."""

    def rate(count: int) -> float:
        return (sequences + sum(acceptance**j for j in range(1, count + 1))) / (fixed + slope * (sequences + count))

    return max(range(limit + 1), key=rate)


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("sequences", [1, 4, 64])
@pytest.mark.parametrize(("fixed", "slope"), [(1.0, 0.02), (1.0, 0.2), (0.2, 1.0)])
def test_a_draft_is_as_long_as_makes_the_step_yield_most(acceptance, sequences, fixed, slope):
    expected = best_length(acceptance, fixed, slope, sequences, 16)
    assert StepDrafts(sequences, fixed, slope).length(acceptance, 16) == expected


def test_drafts_of_other_sequences_count_as_part_of_the_step():
    step = StepDrafts(2, 1.0, 0.1)
    alone = step.length(0.7, 16)
    step.add(0.7, alone)
    assert step.length(0.7, 16) < alone


@pytest.mark.parametrize("acceptances", [[0.3], [0.9], [0.9, 0.2, 0.0], [0.7] * 5])
@pytest.mark.parametrize("proposal", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("slope", [0.01, 0.1])
def test_a_drafter_with_weights_proposes_as_many_tokens_as_make_steps_yield_most(acceptances, proposal, slope):
    sequences = len(acceptances)

    def rate(count: int) -> float:
        """Where each sequence has as many of the proposed tokens verified as pay."""
        seconds, tokens = 1.0 + slope * sequences, float(sequences)
        for j in range(1, count + 1):
            chances = [a**j for a in acceptances if a**j * seconds > slope * tokens]
            seconds, tokens = seconds + proposal + slope * len(chances), tokens + sum(chances)
        return tokens / seconds

    step = StepDrafts(sequences, 1.0, slope, proposal)
    assert step.proposals(acceptances, 8) == max(range(9), key=rate)


def test_nothing_is_drafted_before_the_cost_of_a_step_is_known():
    assert StepDrafts(1, 0.0, 0.0).length(1.0, 4) == 0


def test_acceptance_is_learned_from_the_tokens_up_to_the_first_rejected_one():
    drafts = SequenceDrafts()
    assert drafts.acceptance(0) == OPTIMISM
    for length in range(0, 600, 3):
        drafts.record(8, 3, length)
    assert drafts.acceptance(600) == pytest.approx(3 / 4, abs=0.02)
    assert (drafts.num_drafted, drafts.num_accepted) == (1600, 600)


def test_a_pause_grows_with_every_miss_and_ends_with_a_hit():
    drafts, length, pauses = SequenceDrafts(), 0, []
    for _ in range(10):
        drafts.record(4, 0, length)
        pauses.append(max(0, drafts.resume_at - length))
        assert drafts.acceptance(max(length, drafts.resume_at)) > 0
        length = max(length, drafts.resume_at) + 1
    assert pauses == [0, 4, 8, 16, 32, 64, 128, 128, 128, 128]
    drafts.record(4, 1, length)
    drafts.record(4, 0, length)
    assert drafts.resume_at <= length
