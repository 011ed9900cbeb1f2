"""Suffix decoding against a search of all places."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.options.speculation import SpeculativeConfig
from engine.spec_decode import suffix
from engine.spec_decode.suffix import SuffixDrafter

tokens_of = st.lists(st.integers(0, 2), max_size=12)


def make(shortest: int = 2, **options) -> SuffixDrafter:
    options = {f"suffix_decoding_{key}": value for key, value in options.items()}
    return SuffixDrafter(SpeculativeConfig(method="suffix", **options), shortest)


def plain_search(
    answers: list[list[int]], tokens: list[int], shortest: int, limit: int, factor: float, least: float
) -> set[tuple[int, ...]]:
    """Every draft that is right: of equally frequent tokens any may be chosen."""
    for size in range(len(tokens), shortest - 1, -1):
        rests = []
        for text in [tokens, *answers]:
            for place in range(size, len(text)):
                if text[place - size : place] == tokens[len(tokens) - size :]:
                    rests.append(text[place:] * limit if text is tokens else text[place:])
        if rests:
            return extend((), rests, min(limit, int(factor * size)), least * len(rests))
    return {()}


def extend(draft: tuple[int, ...], rests: list[list[int]], limit: int, least: float) -> set[tuple[int, ...]]:
    following = [rest[len(draft)] for rest in rests if len(rest) > len(draft) and tuple(rest[: len(draft)]) == draft]
    most = max(map(following.count, following), default=0)
    if len(draft) == limit or not following or most < least:
        return {draft}
    best = {token for token in following if following.count(token) == most}
    return set().union(*(extend((*draft, token), rests, limit, least) for token in best))


@given(
    answers=st.lists(tokens_of, max_size=3),
    text=tokens_of,
    shortest=st.integers(1, 3),
    limit=st.integers(1, 5),
    factor=st.sampled_from([0.4, 1.0, 3.0]),
    least=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
)
def test_the_draft_is_what_most_places_of_the_longest_match_go_on_with(answers, text, shortest, limit, factor, least):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "CANDIDATES", 100)
        patch.setattr("engine.spec_decode.ngram.CANDIDATES", 100)
        drafter = make(shortest, max_tree_depth=100, max_spec_factor=factor, min_token_prob=least)
        for answer in answers:
            drafter.finish([9, *answer], 1, "")
        tokens: list[int] = []
        sequence = drafter.follow(tokens, "")
        for token in text:
            tokens.append(token)
            expected = plain_search(answers, tokens, shortest, limit, factor, least)
            assert tuple(sequence.propose(limit)) in expected


@given(
    ended=st.lists(st.tuples(tokens_of, st.sampled_from(["", "a", "b"])), max_size=12),
    max_answers=st.integers(0, 3),
    text=tokens_of,
    salt=st.sampled_from(["", "a", "b"]),
)
def test_only_the_newest_answers_of_the_same_salt_are_searched(ended, max_answers, text, salt):
    """The rest leaves nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "CACHED_TOKENS", 20)
        drafter = make(max_cached_requests=max_answers)
        kept: list[tuple[list[int], str]] = []
        for answer, other in ended:
            drafter.finish([9, *answer], 1, other)
            kept += [(answer, other)] * (len(answer) > drafter.shortest and max_answers > 0)
            while len(kept) > max_answers or sum(len(tokens) for tokens, _ in kept) > 20:
                del kept[0]
        size = drafter.shortest
        grams = {(other, *answer[i - size : i]) for answer, other in kept for i in range(size, len(answer))}
        assert set(drafter._newest) == grams
        places = {
            (tuple(answer), index)
            for answer, other in kept
            for index in range(size, len(answer))
            if other == salt and answer[index - size : index] == text[-size:]
        }
        found = [(tuple(answer), index) for answer, index in drafter.places(text, salt)]
        assert set(found) == places or len(found) == suffix.CANDIDATES


def test_an_answer_serves_those_of_its_salt_only():
    drafter = make()
    drafter.finish([1, 2, 3, 4, 5], 0, "mine")
    assert drafter.follow([1, 2], "mine").propose(4) == [3, 4]
    assert drafter.follow([1, 2], "yours").propose(4) == drafter.follow([1, 2], "").propose(4) == []


def test_prompts_of_others_are_not_kept():
    drafter = make()
    drafter.finish([1, 2, 3, 4, 5], 5, "")
    drafter.finish([1, 2, 3, 4, 5], 3, "")
    assert drafter.follow([1, 2], "").propose(4) == []


def test_the_more_tokens_match_the_longer_is_the_draft():
    drafter = make(max_spec_factor=1.5, max_tree_depth=12)
    drafter.finish(list(range(100)), 0, "")
    assert drafter.follow([99, 4, 5], "").propose(10) == [6, 7, 8]
    assert drafter.follow([99, 3, 4, 5], "").propose(10) == [6, 7, 8, 9]
    assert drafter.follow(list(range(6)), "").propose(10) == [6, 7, 8, 9, 10, 11], "4 tokens are compared"


def test_a_token_that_follows_too_rarely_ends_the_draft():
    drafter = make(min_token_prob=0.5)
    for last in (5, 6, 7):
        drafter.finish([1, 2, 3, last, 9], 0, "")
    assert drafter.follow([1, 2], "").propose(4) == [3]
    drafter.finish([1, 2, 3, 7, 9], 0, "")
    assert drafter.follow([1, 2, 3], "").propose(4) == [7, 9]


def test_of_a_long_answer_its_last_tokens_are_kept():
    drafter = make()
    drafter.finish(list(range(suffix.ANSWER_TOKENS + 10)), 0, "")
    assert drafter.follow([5, 6], "").propose(2) == []
    assert drafter.follow([20, 21], "").propose(2) == [22, 23]
