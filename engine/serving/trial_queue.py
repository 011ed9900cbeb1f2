"""Requests that are tried apart, because an engine has ended with each of them and others."""

from __future__ import annotations

from collections import deque

from engine.wire.generate_request import TRIAL_S, TRIAL_TOKENS, GenerateRequest


class TrialQueue:
    """Lets one request at a time be tried, whichever ingress sends it: two suspects in one engine could not be told
    apart. The next one waits until the first has TRIAL_TOKENS tokens or has ended, but at most TRIAL_S."""

    def __init__(self) -> None:
        self._tried, self._tokens_left, self._ends_at = "", 0, 0.0
        self._waiting: deque[GenerateRequest] = deque()

    def add(self, request: GenerateRequest) -> None:
        self._waiting.append(request)

    def next(self, now: float) -> GenerateRequest | None:
        """Return the request that is tried from now on; None if there is none, or another one is tried. now: seconds
        on any one clock."""
        if not self._waiting or (self._tried and now < self._ends_at):
            return None
        request = self._waiting.popleft()
        self._tried, self._tokens_left, self._ends_at = request.request_id, TRIAL_TOKENS, now + TRIAL_S
        return request

    def answered(self, request_id: str, tokens: int, ended: bool) -> None:
        """Note that a request has got tokens, or has ended."""
        if request_id == self._tried:
            self._tokens_left -= tokens
            if ended or self._tokens_left <= 0:
                self._tried = ""

    def remove(self, request_id: str) -> GenerateRequest | None:
        """Remove a request that waits, and return it."""
        found = next((request for request in self._waiting if request.request_id == request_id), None)
        if found is not None:
            self._waiting.remove(found)
        return found
