"""Suffix decoding: proposes the tokens that followed the newest tokens earlier, in the sequence itself or in other
outputs of the model.

Oliaro et al., SuffixDecoding, arXiv:2411.04975; vLLM's method `suffix`. An index of n-grams replaces suffix trees: it
finds places, whose matches are then extended. It needs one entry per token instead of a path of nodes. Only the newest
places of a common n-gram are compared.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.options.speculation import SpeculativeConfig
from engine.spec_decode.ngram import NgramSequence, match_length

SHORTEST = 3  # tokens of a match
CANDIDATES = 16  # places in earlier answers that are compared, newest first
ANSWER_TOKENS = 2048  # last tokens of an answer that are kept; limited, so that `finish` never delays a step for long
CACHED_TOKENS = 2**18  # of all answers

Gram = tuple[str | int, ...]  # a cache salt, and tokens


@dataclass(frozen=True, slots=True)
class CachedOutput:
    tokens: array[int]
    before: array[int]
    """For each token, the previous place of the n-gram before it; 0 if there is none."""
    cache_salt: str


class SuffixDrafter:
    """The newest answers, with an index of every n-gram of `shortest` tokens in them."""

    def __init__(self, config: SpeculativeConfig, shortest: int = SHORTEST):
        self._factor, self._least = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        self._depth = config.suffix_decoding_max_tree_depth
        self.longest = max(1, int(self._depth / (1 + self._factor)))  # a longer match would shorten its draft
        self.shortest = min(shortest, self.longest)
        self._max_answers = config.suffix_decoding_max_cached_requests
        # tokens of all answers are numbered from 1 on; the place of an n-gram is the number of the token after it
        self._next = 1
        self._answers: list[CachedOutput] = []  # oldest first
        self._starts: list[int] = []  # number of the first token of each
        self._newest: dict[Gram, int] = {}  # n-gram -> its newest place

    def follow(self, tokens: list[int], cache_salt: str) -> SuffixSequence:
        return SuffixSequence(self, tokens, cache_salt)

    def finish(self, tokens: list[int], num_prompt: int, cache_salt: str) -> None:
        """Keep the answer, and drop the oldest answers if there are too many."""
        kept = tokens[max(num_prompt, len(tokens) - ANSWER_TOKENS) :]
        if len(kept) <= self.shortest or not self._max_answers:
            return
        size, start, before = self.shortest, self._next, array("q", [0] * self.shortest)
        for index in range(size, len(kept)):
            gram: Gram = (cache_salt, *kept[index - size : index])
            before.append(self._newest.get(gram, 0))
            self._newest[gram] = start + index
        self._next += len(kept)
        self._starts.append(start)
        self._answers.append(CachedOutput(array("i", kept), before, cache_salt))
        while len(self._answers) > self._max_answers or self._next - self._starts[0] > CACHED_TOKENS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        start, answer, size = self._starts.pop(0), self._answers.pop(0), self.shortest
        for index in range(size, len(answer.tokens)):
            gram: Gram = (answer.cache_salt, *answer.tokens[index - size : index])
            if self._newest.get(gram) == start + index:
                del self._newest[gram]

    def places(self, tokens: list[int], cache_salt: str) -> list[tuple[Sequence[int], int]]:
        """Return the occurrences of the newest `shortest` tokens in answers of this salt, as (answer, index of the next
        token)."""
        found: list[tuple[Sequence[int], int]] = []
        place = self._newest.get((cache_salt, *tokens[-self.shortest :]), 0)
        while place and len(found) < CANDIDATES and place >= self._starts[0]:
            number = bisect_right(self._starts, place) - 1
            answer, index = self._answers[number], place - self._starts[number]
            found.append((answer.tokens, index))
            place = answer.before[index]
        return found

    def choose(self, rests: list[list[int]], limit: int) -> list[int]:
        """Return a draft that takes, at each place, the most frequent token of the continuations that agree with it so
        far. It ends where too small a share of all continuations agrees."""
        drafts: list[int] = []
        least = self._least * len(rests)
        while rests and len(drafts) < limit:
            token, count = Counter(rest[0] for rest in rests).most_common(1)[0]
            if count < least:
                break
            if rests.count(rests[0]) == len(rests):
                return [*drafts, *rests[0][: limit - len(drafts)]]
            drafts.append(token)
            rests = [rest[1:] for rest in rests if len(rest) > 1 and rest[0] == token]
        return drafts

    def draft_tokens(self, match: int, limit: int) -> int:
        """Return how many tokens may be drafted after a match of `match` tokens, at most `limit`."""
        return min(limit, int(self._factor * match), self._depth - match)


class SuffixSequence:
    """One sequence, searched together with earlier answers."""

    def __init__(self, drafter: SuffixDrafter, tokens: list[int], cache_salt: str):
        self._drafter, self._tokens, self._salt = drafter, tokens, cache_salt
        self._own = NgramSequence(drafter.shortest, drafter.longest, tokens)

    def propose(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that followed the longest earlier match of the newest tokens."""
        drafter, tokens, end = self._drafter, self._tokens, len(self._tokens)
        found: list[tuple[Sequence[int], int]] = [(tokens, place) for place in self._own.places()]
        found += drafter.places(tokens, self._salt)
        if not found:
            return []
        newest, lengths = tokens[-drafter.longest :], []
        for text, place in found:
            if list(text[max(0, place - len(newest)) : place]) == newest:  # fast path for the longest match
                lengths.append(len(newest))
            else:
                lengths.append(match_length(text, place, tokens, drafter.shortest, drafter.longest))
        longest = max(lengths)
        limit = drafter.draft_tokens(longest, limit)
        rests: list[list[int]] = []
        for (text, place), length in zip(found, lengths, strict=True):
            if length == longest:
                rest = list(text[place : place + limit])
                if text is tokens and len(rest) < limit:  # a repetition is assumed to go on
                    rest = [tokens[place + i % (end - place)] for i in range(limit)]
                rests.append(rest)
        return drafter.choose(rests, limit)
