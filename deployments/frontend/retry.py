"""The state that lets a sequence continue in another engine when its own is lost. Knows no socket and no clock.

Each attempt has its own request id: `<id>` first, then `<id>.1`, `<id>.2`. The ingress listens to the newest one
only, so tokens of an engine that was thought dead and comes back are dropped.
"""

from __future__ import annotations

import msgspec

from deployments.observability.stats import REPLAY_REASONS
from engine.errors import EngineError, EngineUnavailable, RequestTimeout, ServingError
from engine.wire.messages import GenerateRequest, TokenDelta
from engine.wire.model_identity import ModelIdentity
from engine.wire.sampling_params import seed_of

BACK_OFF_S = 0.25  # before the first replay: a replica whose engine broke is gone by then
MAX_BACK_OFF_S = 2.0
MIN_TIMEOUT_S = 0.001  # timeout of an attempt that begins at the deadline


class TokensLost(EngineError):
    """The engine says that the request has ended, but its last tokens did not come; or later ones came before them."""

    def __init__(self, request_id: str):
        Exception.__init__(self, request_id)

    def __str__(self) -> str:
        return f"tokens of request {self.args[0]} were lost"


# Codes of errors that no request is to blame for, unless it is the one that kills its engines: hence the bound on
# replays.
ENGINE_GONE = ("engine_unavailable", "tokens_lost", "other_model")


class RetryState:
    """One request, and the output that has come for it so far."""

    def __init__(self, request: GenerateRequest, max_replays: int, now: float):
        """now: seconds on the clock that all other calls use; the deadline counts from here."""
        self.num_replays = 0  #: attempts after the first
        self.output: list[int] = []
        self.request = request
        self._model = request.model
        self._max_replays = max_replays
        self._deadline_at = None if request.timeout_s is None else now + request.timeout_s

    @property
    def request_id(self) -> str:
        """Request id of the present attempt."""
        return f"{self.request.request_id}.{self.num_replays}" if self.num_replays else self.request.request_id

    def back_off_s(self, now: float) -> float:
        """Return how long to wait before the present attempt; never beyond the deadline."""
        back_off_s = min(BACK_OFF_S * 2 ** (self.num_replays - 1), MAX_BACK_OFF_S) if self.num_replays else 0.0
        left_s = self.left_s(now)
        return back_off_s if left_s is None else min(back_off_s, left_s)

    def left_s(self, now: float) -> float | None:
        """Return the seconds until the deadline, never below 0; None without one."""
        return None if self._deadline_at is None else max(0.0, self._deadline_at - now)

    def attempt(self, now: float) -> GenerateRequest:
        """Return the engine request of the present attempt. The output so far ends its prompt, and counts as output.

        The engine derives a missing seed from the request id, so later attempts are given the first one's.
        """
        left_s = self.left_s(now)
        timeout_s = None if left_s is None else max(left_s, MIN_TIMEOUT_S)
        request = msgspec.structs.replace(self.request, timeout_s=timeout_s, model=self._model)
        if not self.num_replays:
            return request
        params = request.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=signed(seed_of(request.request_id)))
        if self.output:  # it came with the first token
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        prompt = [*request.prompt, *self.output]
        return msgspec.structs.replace(
            request, request_id=self.request_id, prompt=prompt, num_prompt=len(request.prompt), params=params
        )

    def adopt(self, model: ModelIdentity) -> bool:
        """Address the present attempt to the model that has replaced the one it was for. Returns False if that is
        impossible: there is output of the old model, or the prompt's tokens mean something else to the new one."""
        if self._model is None or self._model != self.request.model:  # once per attempt is enough
            return False
        if self.output or self._model.vocabulary != model.vocabulary:
            return False
        self._model = model
        return True

    def add(self, delta: TokenDelta) -> TokenDelta:
        """Take a delta of the present attempt, and return it without what only a sequence's first token brings.

        Raises TokensLost if one before it is missing, lost when its connection broke.
        """
        if delta.position != len(self.output):
            raise TokensLost(self.request_id)
        if self.output and delta.num_cached_tokens:
            delta = msgspec.structs.replace(delta, num_cached_tokens=0)
        self.output += delta.token_ids
        return delta

    def replay(self, error: BaseException) -> str | None:
        """Begin another attempt after this error, and return the reason for it; None if that is of no use.

        A full queue is an answer to a new request, but no reason to break one off that was running.
        """
        if not isinstance(error, ServingError) or self.num_replays >= self._max_replays:
            return None
        reason = error.code
        if reason not in (REPLAY_REASONS if self.num_replays else ENGINE_GONE):
            return None
        self.num_replays += 1
        if not self.output:
            self._model = self.request.model
        return reason

    def failure(self, error: BaseException) -> BaseException:
        """Return the error for the client when an attempt has failed for good. How an engine was lost is in the log."""
        match error:
            case ServingError(code="request_timeout"):
                return self.timeout()
            case ServingError(code="engine_unavailable"):
                return EngineUnavailable("no engine is up that could finish the request; send it again")
            case _:
                return error

    def timeout(self) -> RequestTimeout:
        """Return a timeout with the limit that the client knows: an attempt has only what is left of it."""
        return RequestTimeout(self.request.request_id, self.request.timeout_s or 0.0)


def signed(seed: int) -> int:
    """Return the seed as SamplingParams takes it."""
    return (seed + 2**63) % 2**64 - 2**63
