"""Predicted outputs: the client has sent what it expects the output to be, such as a file before an edit.

OpenAI's field `prediction`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WINDOW = 4096  # tokens of the prediction searched at once
TOKEN_BYTES = array("q").itemsize


class PredictedText:
    """Follows the prediction from its start. After the output departs from it, drafting resumes at the next place in
    the prediction where the two newest tokens occur."""

    def __init__(self, prediction: list[int], tokens: list[int], num_prompt: int):
        """tokens: tokens of the sequence, a list that is read at each proposal and only grows."""
        self._prediction, self._tokens = prediction, tokens
        self._bytes = as_bytes(prediction)  # bytes are searched ten times as fast as a list
        self._read = num_prompt  # tokens of the sequence compared so far
        self._next = 0  # index in the prediction after the last match
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
            first = found + 1  # the match straddles two tokens


def as_bytes(tokens: list[int]) -> bytes:
    return array("q", tokens).tobytes()
