"""A drafter that knows what comes, and lies about it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.spec_decode.draft_length import SequenceDrafts, StepDrafts
from tests.fake_runner import Harness, expected_output, next_token

OUTSIDE = [-1, 2**20, 2**40]  # of any vocabulary


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as many tokens as there may be, whatever they cost and however they fared."""
    monkeypatch.setattr(StepDrafts, "_least", lambda step: -1.0)
    monkeypatch.setattr(StepDrafts, "length", lambda step, acceptance, limit: limit)
    monkeypatch.setattr(StepDrafts, "proposals", lambda step, acceptances, limit: limit)
    monkeypatch.setattr(SequenceDrafts, "untried", False)
    monkeypatch.setattr(SequenceDrafts, "pause", lambda drafts, length: None)


class WildDrafter:
    """Proposes tokens that are right, wrong from some position on, in no vocabulary, too many, or none at all."""

    def __init__(self, seed: int = 0, kinds: tuple[str, ...] = ("right", "wrong", "half", "outside", "none", "long")):
        self._random, self._kinds = random.Random(seed), kinds
        self.rest_of: Callable[[list[int]], list[int]] = lambda tokens: []
        """Returns what the sequence with these tokens goes on with."""

    def follow(self, tokens: list[int], cache_salt: str) -> WildSequence:
        return WildSequence(self, tokens)

    def finish(self, tokens: list[int], num_prompt: int, cache_salt: str) -> None:
        assert tokens[:num_prompt]

    def propose(self, seed: int, tokens: list[int], num_drafts: int) -> list[int]:
        """Draft with weights, in the fake runner's steps."""
        right: list[int] = []
        while len(right) < num_drafts:
            right.append(next_token(seed, tokens + right))
        return [*self.lie(right, num_drafts), *[-1] * num_drafts][:num_drafts]

    def know_texts(self, texts: list[list[int]]) -> None:
        """Draft what these sequences go on with."""
        self.rest_of = lambda tokens: next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])

    def know(self, harness: Harness) -> None:
        """Draft for the requests of a harness."""

        def rest_of(tokens: list[int]) -> list[int]:
            (request,) = (r for r in harness.scheduler.queue.live.values() if r.tokens is tokens)
            prompt = tokens[: request.num_prompt]
            output = expected_output(prompt, harness.params[request.request_id], harness.scheduler.limits.max_model_len)
            assert output[: request.num_output] == tokens[request.num_prompt :]
            return output[request.num_output :]

        self.rest_of = rest_of

    def lie(self, right: list[int], limit: int) -> list[int]:
        count, wrong = self._random.randrange(limit + 1), [0, 1, 2, 3, 4]
        return {
            "right": right[:limit],
            "wrong": wrong[:limit],
            "half": [*right[:count], *wrong],
            "outside": [*right[:count], self._random.choice(OUTSIDE)],
            "none": [],
            "long": [*right, *wrong] * 10,
        }[self._random.choice(self._kinds)]


class WildSequence:
    def __init__(self, drafter: WildDrafter, tokens: list[int]):
        self._drafter, self._tokens = drafter, tokens

    def propose(self, limit: int) -> list[int]:
        assert limit > 0
        return self._drafter.lie(self._drafter.rest_of(self._tokens), limit)
