"""Finds out where the marks of a conversation are in its prompt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from engine.wire.parts.holds import HoldMark


class MarkedText:
    """Finds out where marks are in a rendered prompt: it is rendered once more with a random word at each mark."""

    def __init__(self) -> None:
        self._word = secrets.token_hex(8)

    def word(self, number: int) -> str:
        return f"{self._word}:{number:03}"

    def offsets(self, text: str, numbers: Sequence[int], render: Callable[[Sequence[int]], str]) -> dict[int, int]:
        """Return the offsets of marks in `text`, the prompt rendered without words, by the numbers of the marks.

        render: function that renders the prompt with the words of given marks. If the template treats the ends of texts
        specially, for instance trims them, the prompt is rendered for each mark alone, and the mark is where that
        prompt begins to differ from `text`. A mark whose word the template leaves out is put at the previous mark.
        """
        places, rest, marked = {}, "", render(numbers)
        for number in numbers:
            before, _, marked = marked.partition(self.word(number))
            rest += before
            places[number] = len(rest)
        if len(rest) < len(text) and rest + marked == text:
            return places
        last = 0
        for number in numbers:
            alone = render([number])
            last = common_prefix(text, alone) if self.word(number) in alone else last
            places[number] = last
        return places


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
    same place, the one with the longest time counts."""
    longest: dict[int, float] = {}
    for tokens, ttl_s in places:
        longest[tokens] = max(ttl_s, longest.get(tokens, 0.0))
    return [HoldMark(tokens, ttl_s) for tokens, ttl_s in sorted(longest.items()) if tokens]
