"""The deltas that come after the end of an HTTP request."""

from __future__ import annotations

from collections.abc import Callable


class LateDeltas:
    """The last deltas of attempts that were aborted, as far as their engines still owe them to one HTTP request."""

    def __init__(self) -> None:
        self._num_expected = 0
        self._waiting: list[Callable[[], None]] = []

    def expect(self) -> None:
        """Note that another delta will come. `came` must follow."""
        self._num_expected += 1

    def came(self) -> None:
        """Note that an expected delta has come, or will never."""
        self._num_expected -= 1
        if not self._num_expected:
            waiting, self._waiting = self._waiting, []
            for then in waiting:
                then()

    def when_none(self, then: Callable[[], None]) -> None:
        """Call `then` once no delta is expected any more, maybe at once. The request must have ended."""
        if self._num_expected:
            self._waiting.append(then)
        else:
            then()
