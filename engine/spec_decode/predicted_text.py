"""Predicted outputs: the client has sent what it takes the answer to be, such as a file before an edit.

OpenAI's field `prediction`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WINDOW = 4096  # tokens of the prediction that are searched at once
TOKEN_BYTES = array("q").itemsize


class PredictedText:
    """Follows the prediction from its start on. Where the answer departs from it, it is found again further on, at the
    first place of the two newest tokens."""

    def __init__(self, prediction: list[int], tokens: list[int], num_prompt: int):
        """tokens: of the sequence, read at each proposal; until then they only ever grow."""
        self._prediction, self._tokens = prediction, tokens
        self._bytes = as_bytes(prediction)  # which are searched ten times as fast as a list
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
        pair, start = as_bytes([last, newest]), max(self._next - 1, 0)
        first, end = start * TOKEN_BYTES, (start + 1 + WINDOW) * TOKEN_BYTES
        while (found := self._bytes.find(pair, first, end)) >= 0:
            if found % TOKEN_BYTES == 0:
                self._next, self._lost = found // TOKEN_BYTES + 2, False
                return
            first = found + 1  # the end of one token and the start of another


def as_bytes(tokens: list[int]) -> bytes:
    return array("q", tokens).tobytes()
