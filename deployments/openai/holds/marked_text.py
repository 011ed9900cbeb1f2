"""Finds out where the marks of a conversation are in its prompt."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from engine.wire.messages import HoldMark


class MarkedText:
    """Finds out where marks are in a rendered prompt: it is rendered once more with a random word at each mark. The
    marks are in the order of the prompt."""

    def __init__(self) -> None:
        self._word = secrets.token_hex(8)

    def word(self, number: int) -> str:
        """Return the word for mark `number`."""
        return f"{self._word}:{number:03}"

    def offsets(self, text: str, marked: str, count: int) -> list[int]:
        """Return where the `count` marks are in `text`, given the same text with their words.

        A template may treat the end of a text in some special way: then its mark is where the two texts begin to
        differ. If a template leaves out the text of a mark, the mark is where the one before it is.
        """
        places, rest = [0] * count, ""
        for number in range(count):
            before, there, after = marked.partition(self.word(number))
            if there:
                rest += before
                marked = after
            places[number] = len(rest) if there or not number else places[number - 1]
        equal = common_prefix(text, rest + marked)
        return [min(place, equal) for place in places]


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many leading items of two sequences are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared faster than items
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def hold_marks(places: Sequence[tuple[int, float]]) -> list[HoldMark]:
    """Return marks in ascending order from (tokens, seconds), without those before the first token. Of marks at the
    same place, the longest counts."""
    longest: dict[int, float] = {}
    for tokens, ttl_s in places:
        longest[tokens] = max(ttl_s, longest.get(tokens, 0.0))
    return [HoldMark(tokens, ttl_s) for tokens, ttl_s in sorted(longest.items()) if tokens]
