"""State that lets a sequence continue in another engine when its present engine is lost. Uses no socket and no clock.

Each attempt has its own request id: `<id>`, then `<id>.1`, `<id>.2`. The ingress accepts only deltas of the newest
attempt. So it drops late tokens of an engine that it wrongly considered dead.
"""

from __future__ import annotations

import msgspec

from deployments.observability.stats import REPLAY_REASONS
from engine.errors import EngineError, EngineUnavailable, RequestTimeout, ServingError
from engine.wire.generate_request import GenerateRequest, ModelIdentity
from engine.wire.remote_request import KVSource
from engine.wire.sampling_params import seed_of
from engine.wire.token_delta import TokenDelta

BACK_OFF_S = 0.25  # before the first replay, by when a replica with a broken engine is gone
MAX_BACK_OFF_S = 2.0
MIN_TIMEOUT_S = 0.001  # timeout of an attempt that begins at the deadline


class TokensLost(EngineError):
    """Raised when tokens of a request are missing although the request has ended in its engine, or later tokens have
    arrived."""

    def __init__(self, request_id: str):
        Exception.__init__(self, request_id)

    def __str__(self) -> str:
        return f"tokens of request {self.args[0]} were lost"


# Codes of errors that are not the request's fault, unless it is the request that kills its engines: hence the limit on
# replays.
ENGINE_GONE = ("engine_unavailable", "tokens_lost", "other_model")


class RetryState:
    """One request, with its output so far."""

    def __init__(self, request: GenerateRequest, max_replays: int, now: float):
        """now: seconds, on the same clock as in all other calls. The deadline counts from here."""
        self.num_replays = 0  #: attempts after an engine was lost
        self.num_moves = 0  #: attempts that go on with the KV of the attempt before
        self.source: KVSource | None = None  #: engine that holds the KV for the current attempt
        self.avoid: list[str] = []  #: engines that should not get the current attempt if there are others
        self.numerics = ""  #: what the current attempt computes with, once it has brought tokens
        self.output: list[int] = []
        self.request = request
        self._model = request.model
        self._max_replays = max_replays
        self._deadline_at = None if request.timeout_s is None else now + request.timeout_s
        self._first_token_by = None if request.ttft_slo_s is None else now + request.ttft_slo_s

    @property
    def request_id(self) -> str:
        return f"{self.request.request_id}.{self.num_retries}" if self.num_retries else self.request.request_id

    @property
    def num_retries(self) -> int:
        """Attempts after the first."""
        return self.num_replays + self.num_moves

    def back_off_s(self, now: float) -> float:
        """Return the seconds to wait before the current attempt, at most until the deadline. A request that moves does
        not wait."""
        waits = self.num_replays and self.source is None
        back_off_s = min(BACK_OFF_S * 2 ** (self.num_replays - 1), MAX_BACK_OFF_S) if waits else 0.0
        left_s = self.left_s(now)
        return back_off_s if left_s is None else min(back_off_s, left_s)

    def left_s(self, now: float) -> float | None:
        """Return the seconds until the deadline, at least 0; None without a deadline."""
        return None if self._deadline_at is None else max(0.0, self._deadline_at - now)

    def attempt(self, now: float) -> GenerateRequest:
        """Return the engine request of the current attempt. Its prompt includes the output so far, marked as output.
        The engine derives a missing seed from the request id, so later attempts carry the first attempt's seed. An
        attempt after one that has brought tokens asks for the same numerics, but one after that takes what there is."""
        left_s = self.left_s(now)
        timeout_s = None if left_s is None else max(left_s, MIN_TIMEOUT_S)
        slo_s = None if self._first_token_by is None or self.output else self._first_token_by - now
        request = msgspec.structs.replace(
            self.request, timeout_s=timeout_s, ttft_slo_s=slo_s, model=self._model, numerics=self.numerics
        )
        request, self.numerics = request.asking(self.source), ""
        if not self.num_retries:
            return request
        params = request.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=signed(seed_of(request.request_id)))
        return msgspec.structs.replace(request, request_id=self.request_id, params=params).continued(self.output)

    def adopt(self, model: ModelIdentity) -> bool:
        """Send the current attempt to the model that has replaced the requested one. Returns False if that is
        impossible: the old model has produced output already, or the prompt's token ids mean something else to the new
        model."""
        if self._model is None or self._model != self.request.model:  # at most once per attempt
            return False
        if self.output or self._model.vocabulary != model.vocabulary:
            return False
        self._model = model
        return True

    def add(self, delta: TokenDelta) -> TokenDelta:
        """Record a delta of the current attempt, and return it. Fields that belong to the first token only are left out
        in later attempts. Raises TokensLost if an earlier delta is missing, because its connection broke."""
        if delta.position != len(self.output):
            raise TokensLost(self.request_id)
        if self.output and delta.num_cached_tokens:
            delta = msgspec.structs.replace(delta, num_cached_tokens=0)
        self.output += delta.token_ids
        return delta

    def replay(self, error: BaseException, source: KVSource | None = None, engine: str = "") -> str | None:
        """Begin another attempt after this error. Returns the reason, or None if another attempt would be useless.

        A full queue ends a request at its first attempt, but not at later ones. The number of moves is not limited,
        because no engine has failed. source: engine that holds the KV of a request that moves; None if no engine does.
        engine: engine of the previous attempt, if it is known.
        """
        reason = error.code if isinstance(error, ServingError) else ""
        self.source, self.avoid = source, [engine] if reason == "moved" else []
        if reason == "moved":
            self.num_moves += 1
        elif reason in (REPLAY_REASONS if self.num_retries else ENGINE_GONE) and self.num_replays < self._max_replays:
            self.num_replays += 1
        else:
            return None
        if not self.output:
            self._model = self.request.model
        return reason

    def failure(self, error: BaseException, now: float) -> BaseException:
        """Return the error to send to the client after the last attempt has failed. How the engine or its tokens were
        lost is only logged: a client may send the request again in either case.

        A replica aborts a request that its engine does not end in time. The engine's answer can arrive before the
        replica's.
        """
        match error:
            case ServingError(code="request_timeout"):
                return self.timeout()
            case ServingError(code="aborted") if self.left_s(now) == 0.0:
                return self.timeout()
            case ServingError(code="engine_unavailable" | "tokens_lost"):
                return EngineUnavailable("no engine is up to finish the request; send it again")
            case _:
                return error

    def timeout(self) -> RequestTimeout:
        """Return a timeout error that states the client's limit. The engine's error would state only the time that was
        left for the last attempt."""
        return RequestTimeout(self.request.request_id, self.request.timeout_s or 0.0)


def signed(seed: int) -> int:
    """Return the 64-bit seed as a signed integer, as SamplingParams requires."""
    return (seed + 2**63) % 2**64 - 2**63
