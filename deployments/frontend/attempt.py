"""The call that is open while one engine works for a sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from deployments.frontend.retry import TokensLost

FINAL_DELTA_S = 2.0
"""How much later than the end of the call the final delta may come: tokens do not pass through the call."""


class Attempt:
    """One attempt to run a sequence in an engine, which reports its end twice: in the final delta on the token channel,
    and by returning from the call. Whichever is first, the sequence ends once.

    - The final delta comes first: the sequence is finished, and how the call ends means nothing.
    - The call fails first: no more deltas are waited for.
    - The call returns first: the final delta has FINAL_DELTA_S to arrive; then it counts as lost.
    """

    def __init__(self, request_id: str, call: Coroutine[Any, Any, None], wake: Callable[[], None]):
        """Start the call. wake: called when `error` is set."""
        self.request_id = request_id
        self.error: BaseException | None = None
        """Why the final delta will not come, once that is known."""
        self._wake = wake
        self._closed = False
        self._call = asyncio.create_task(call)
        self._call.add_done_callback(self._on_call_ended)

    def close(self) -> bool:
        """Cancel the call, which aborts the request in its engine. Returns False if the call had ended before."""
        self._closed = True
        return self._call.cancel()

    def _on_call_ended(self, call: asyncio.Task[None]) -> None:
        if call.cancelled():
            return
        error = call.exception()
        delay_s = FINAL_DELTA_S if error is None else 0.0
        asyncio.get_running_loop().call_later(delay_s, self._give_up, error or TokensLost(self.request_id))

    def _give_up(self, error: BaseException) -> None:
        if not self._closed:
            self.error = error
            self._wake()
