"""Prompt lookup: what followed the newest tokens where they last stood in the prompt or the output.

Saxena, Prompt Lookup Decoding (2023), github.com/apoorvumang/prompt-lookup-decoding; vLLM's method `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence

INDEXED_AT_ONCE = 4096  # tokens per proposal, under a millisecond; a longer prompt is indexed over several
CANDIDATES = 8  # earlier places that are compared, newest first


class NgramDrafter:
    """Finds the longest match of the last tokens, of `shortest` to `longest` of them; the newest of equal ones."""

    def __init__(self, shortest: int, longest: int):
        assert 1 <= shortest <= longest
        self.shortest, self.longest = shortest, longest

    def follow(self, tokens: list[int]) -> NgramSequence:
        return NgramSequence(self, tokens)

    def finish(self, tokens: list[int], num_prompt: int) -> None:
        pass


class NgramSequence:
    """The places of every n-gram of `shortest` tokens in one sequence, indexed as it grows."""

    def __init__(self, drafter: NgramDrafter, tokens: list[int]):
        self._shortest, self._longest, self._tokens = drafter.shortest, drafter.longest, tokens
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its newest place
        self._before: list[int] = [0] * drafter.shortest  # by such an index: the one of the place before; 0 if none

    def propose(self, limit: int) -> Sequence[int]:
        """Return nothing while a long prompt is still being indexed."""
        tokens, size, end = self._tokens, self._shortest, len(self._tokens)
        indexed = range(len(self._before), min(end, len(self._before) + INDEXED_AT_ONCE))
        for index in indexed:
            gram = tuple(tokens[index - size : index])
            self._before.append(self._newest.get(gram, 0))
            self._newest[gram] = index
        if len(self._before) < end or end <= size:
            return []
        best, longest = 0, 0
        place = self._newest.get(tuple(tokens[end - size :]), 0)
        for _ in range(CANDIDATES):
            if not place or longest == self._longest:
                break
            length = size
            while length < min(self._longest, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        period = end - best  # what repeats itself is taken to go on so
        return [tokens[best + i % period] for i in range(limit)] if best else []
