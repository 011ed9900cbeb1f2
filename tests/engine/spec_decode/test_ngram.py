"""Prompt lookup against a search of all places."""

import hypothesis.strategies as st
from hypothesis import given

from engine.spec_decode import ngram
from engine.spec_decode.ngram import NgramDrafter


def plain_lookup(tokens: list[int], shortest: int, longest: int, limit: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return (tokens[end:] * limit)[:limit]
    return []


@given(
    text=st.lists(st.integers(0, 2), max_size=40),
    shortest=st.integers(1, 3),
    longer=st.integers(0, 3),
    limit=st.integers(1, 5),
)
def test_the_longest_match_is_found_and_of_equal_ones_the_newest(text, shortest, longer, limit):
    tokens: list[int] = []
    sequence = NgramDrafter(shortest, shortest + longer).follow(tokens, "")
    for token in text:
        tokens.append(token)
        found, expected = list(sequence.propose(limit)), plain_lookup(tokens, shortest, shortest + longer, limit)
        assert found == expected or (len(text) > ngram.CANDIDATES and bool(found) == bool(expected))


def test_a_sequence_that_repeats_nothing_gets_no_proposal():
    assert not NgramDrafter(2, 4).follow(list(range(100)), "").propose(4)


def test_what_stood_after_the_same_words_is_proposed_up_to_the_limit():
    sequence = NgramDrafter(2, 4).follow([1, 2, 3, 4, 5, 6, 1, 2], "")
    assert sequence.propose(3) == [3, 4, 5]
    assert sequence.propose(1) == [3]


def test_what_repeats_itself_is_taken_to_go_on():
    assert NgramDrafter(2, 4).follow([1, 2, 1, 2, 1], "").propose(5) == [2, 1, 2, 1, 2]


def test_a_long_prompt_is_indexed_over_several_proposals():
    tokens = [*range(3 * ngram.INDEXED_AT_ONCE), 5, 6, 7, 5, 6]
    sequence = NgramDrafter(2, 2).follow(tokens, "")
    assert [list(sequence.propose(2)) for _ in range(4)] == [[], [], [], [7, 5]]
