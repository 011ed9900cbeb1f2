"""Prompt lookup: proposes the tokens that followed the newest tokens at an earlier place in the prompt or output.

Saxena, Prompt Lookup Decoding (2023), github.com/apoorvumang/prompt-lookup-decoding; vLLM's method `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence

INDEXED_AT_ONCE = 4096  # tokens per proposal, under a millisecond; a longer prompt takes several proposals
CANDIDATES = 8  # earlier places that are compared, newest first


def match_length(text: Sequence[int], place: int, tokens: list[int], known: int, longest: int) -> int:
    """Return how many of the newest `tokens`, at most `longest`, match the `text` before index `place`. known: how many
    are known to match."""
    length, limit, end = known, min(longest, place, len(tokens)), len(tokens)
    while length < limit and text[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class NgramDrafter:
    """Finds the longest match, of `shortest` to `longest` tokens, for a sequence's newest tokens. Of equally long
    matches it takes the newest."""

    def __init__(self, shortest: int, longest: int):
        assert 1 <= shortest <= longest
        self.shortest, self.longest = shortest, longest

    def follow(self, tokens: list[int], cache_salt: str) -> NgramSequence:
        return NgramSequence(self.shortest, self.longest, tokens)

    def finish(self, tokens: list[int], num_prompt: int, cache_salt: str) -> None:
        pass


class NgramSequence:
    """Index of every n-gram of `shortest` tokens in one sequence, extended as the sequence grows."""

    def __init__(self, shortest: int, longest: int, tokens: list[int]):
        self._shortest, self._longest, self._tokens = shortest, longest, tokens
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its newest place
        self._before: list[int] = [0] * shortest  # such an index -> that of the n-gram's previous place, 0 if none

    def places(self) -> list[int]:
        """Return the indices after earlier occurrences of the newest `shortest` tokens, newest occurrence first.

        Returns none while a long prompt is still being indexed.
        """
        tokens, size, end = self._tokens, self._shortest, len(self._tokens)
        indexed = range(len(self._before), min(end, len(self._before) + INDEXED_AT_ONCE))
        for index in indexed:
            gram = tuple(tokens[index - size : index])
            self._before.append(self._newest.get(gram, 0))
            self._newest[gram] = index
        if len(self._before) < end or end <= size:
            return []
        places: list[int] = []
        place = self._newest.get(tuple(tokens[end - size :]), 0)
        while place and len(places) < CANDIDATES:
            places.append(place)
            place = self._before[place]
        return places

    def propose(self, limit: int) -> Sequence[int]:
        tokens, end, best, longest = self._tokens, len(self._tokens), 0, 0
        for place in self.places():
            if longest == self._longest:
                break
            length = match_length(tokens, place, tokens, self._shortest, self._longest)
            if length > longest:
                best, longest = place, length
        period = end - best  # a repetition is assumed to go on
        return [tokens[best + i % period] for i in range(limit)] if best else []
