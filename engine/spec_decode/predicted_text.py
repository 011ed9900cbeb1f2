"""Predicted outputs: the client has sent what it takes the answer to be, such as a file before an edit.

OpenAI's field `prediction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

WINDOW = 4096  # tokens of the prediction that are searched at once


class PredictedText:
    """Follows the prediction from its start on. Where the answer departs from it, it is found again further on, at the
    first place of the two newest tokens."""

    def __init__(self, prediction: list[int], tokens: list[int], num_prompt: int):
        """tokens: of the sequence, read at each proposal; until then they only ever grow."""
        self._prediction, self._tokens = prediction, tokens
        self._read = num_prompt  # tokens of the sequence that were compared
        self._next = 0  # in the prediction, after what was found last
        self._lost = False

    def propose(self, limit: int) -> Sequence[int]:
        tokens, prediction = self._tokens, self._prediction
        for index in range(self._read, len(tokens)):
            if self._lost:
                self._search(tokens[index - 1], tokens[index])
            elif self._next < len(prediction) and prediction[self._next] == tokens[index]:
                self._next += 1
            else:
                self._lost = True
        self._read = len(tokens)
        return [] if self._lost else prediction[self._next : self._next + limit]

    def _search(self, last: int, newest: int) -> None:
        prediction, place = self._prediction, max(self._next, 1)
        window = prediction[place - 1 : place + WINDOW]
        for i, pair in enumerate(pairwise(window)):
            if pair == (last, newest):
                self._next, self._lost = place + i + 1, False
                return
