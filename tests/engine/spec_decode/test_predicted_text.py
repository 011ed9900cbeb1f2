from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from engine.spec_decode import predicted_text
from engine.spec_decode.predicted_text import PredictedText

PROMPT = [90, 91]
PREDICTION = list(range(20))


def drafts_after(output: list[int], limit: int = 3) -> list[int]:
    """The drafts of a sequence that grew token by token, which are those of one that came with all of them."""
    tokens = list(PROMPT)
    grown = PredictedText(PREDICTION, tokens, len(PROMPT))
    for token in output:
        grown.propose(limit)
        tokens.append(token)
    found = list(grown.propose(limit))
    assert list(PredictedText(PREDICTION, tokens, len(PROMPT)).propose(limit)) == found
    return found


def test_the_prediction_is_followed_from_its_start_to_its_end():
    assert drafts_after([]) == [0, 1, 2]
    assert drafts_after([0, 1, 2, 3]) == [4, 5, 6]
    assert drafts_after(PREDICTION[:-1]) == [19]
    assert drafts_after(PREDICTION) == drafts_after([*PREDICTION, 5]) == []


def test_after_words_of_its_own_the_answer_is_found_again_by_two_tokens():
    assert drafts_after([0, 1, 50]) == drafts_after([0, 1, 50, 2]) == []
    assert drafts_after([0, 1, 50, 2, 3]) == [4, 5, 6], "something was put in"
    assert drafts_after([0, 1, 8, 9]) == [10, 11, 12], "something was left out"
    assert drafts_after([50, 51, 52, 0, 1]) == [2, 3, 4], "an introduction"
    assert drafts_after([0, 1, 2, 3, 50, 1, 2]) == [], "what was passed does not come again"


def test_a_place_far_behind_is_not_searched_for(monkeypatch):
    monkeypatch.setattr(predicted_text, "WINDOW", 4)
    assert drafts_after([0, 50, 3, 4]) == [5, 6, 7]
    assert drafts_after([0, 50, 6, 7]) == []


def test_the_end_of_one_token_and_the_start_of_the_next_are_no_token():
    prediction, tokens = [1, 2 << 32, 3 << 32, 4, 2, 3, 7], [9, 5, 2, 3]
    assert list(PredictedText(prediction, tokens, 1).propose(3)) == [7]
    assert list(PredictedText([1, 2, 256, 0, 1, 0, 8], [9, 5, 1, 0], 1).propose(3)) == [8]


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5))
def test_what_is_proposed_stands_in_the_prediction_after_what_the_answer_ends_with(output, prediction, limit):
    proposed = list(PredictedText(prediction, [9, *output], 1).propose(limit))
    size = 2 if output[: len(prediction)] != prediction[: len(output)] else len(output)
    if proposed:
        text = [9, *output][len(output) + 1 - size :]
        assert any(
            prediction[place : place + len(text + proposed)] == text + proposed for place in range(len(prediction))
        )
        assert len(proposed) <= limit
