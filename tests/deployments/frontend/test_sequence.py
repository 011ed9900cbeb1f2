"""The end of an attempt by its call, against its end by the token channel."""

from __future__ import annotations

import asyncio

import pytest

from deployments.frontend import sequence
from deployments.frontend.retry import TokensLost
from deployments.frontend.sequence import Attempt
from engine.errors import EngineUnavailable


class Call:
    """A call that ends when it is told to."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.woken = asyncio.Event()
        self.attempt = Attempt("a.1", self._wait(), self.woken.set)

    async def _wait(self) -> None:
        await self.end

    async def is_woken(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self.woken.wait()
        except TimeoutError:
            return False
        return True


async def test_call_that_fails_ends_the_attempt_at_once_with_its_error(monkeypatch):
    monkeypatch.setattr(sequence, "FINAL_DELTA_S", 60.0)
    call = Call()
    assert call.attempt.error is None
    error = EngineUnavailable("rank 0 died")
    call.end.set_exception(error)
    assert await call.is_woken(10)
    assert call.attempt.error is error
    assert not call.attempt.close(), "there is no call left to cancel"


async def test_call_that_returns_leaves_the_final_delta_time_and_then_counts_as_lost_tokens(monkeypatch):
    monkeypatch.setattr(sequence, "FINAL_DELTA_S", 0.5)
    call = Call()
    call.end.set_result(None)
    assert not await call.is_woken(0.05)
    assert call.attempt.error is None
    assert await call.is_woken(10)
    assert isinstance(call.attempt.error, TokensLost)


@pytest.mark.parametrize("error", [None, EngineUnavailable("rank 0 died")])
async def test_attempt_that_was_closed_in_time_wakes_nobody_however_its_call_ended(monkeypatch, error):
    monkeypatch.setattr(sequence, "FINAL_DELTA_S", 0.0)
    call = Call()
    if error is None:
        call.end.set_result(None)
    else:
        call.end.set_exception(error)
    await asyncio.sleep(0)  # the call has ended, and nobody has been woken yet
    call.attempt.close()
    assert not await call.is_woken(0.05)
    assert call.attempt.error is None


async def test_closing_cancels_a_call_that_is_open_and_wakes_nobody():
    call = Call()
    await asyncio.sleep(0)
    assert call.attempt.close()
    assert not await call.is_woken(0.05)
    assert call.end.cancelled()
    assert call.attempt.error is None
