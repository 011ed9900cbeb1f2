"""A prefill pool without Ray and without engines."""

from __future__ import annotations

import asyncio

from deployments.replicas.remote_dispatcher import PoolState
from deployments.routing.stats import RoutingStats
from engine.errors import ServingError
from engine.wire.messages import EngineStatus
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from tests.engine_stats import engine_stats


class FakeRemotePool:
    """A RemotePool whose calls stay open until `end` or `fail`.

    found: statuses of its replicas. state: what Serve says of them.
    open: calls by handoff. avoided: what each call asked to avoid. cancelled: calls that the caller gave up.
    """

    def __init__(self, *found: EngineStatus, state: PoolState = "up"):
        self.routing = RoutingStats()
        self.found, self.serve_says = list(found), state
        self.open: dict[str, asyncio.Future[None]] = {}
        self.avoided: dict[str, list[str]] = {}
        self.cancelled: list[str] = []

    async def prefill(self, remote_request: RemoteRequest, avoid: list[str]) -> None:
        self.avoided[remote_request.handoff_id] = avoid
        call = self.open[remote_request.handoff_id] = asyncio.get_running_loop().create_future()
        try:
            await call
        except asyncio.CancelledError:
            self.cancelled.append(remote_request.handoff_id)
            raise
        finally:
            del self.open[remote_request.handoff_id]

    async def statuses(self) -> list[EngineStatus]:
        return self.found

    async def state(self) -> PoolState:
        return self.serve_says

    def end(self, handoff_id: str) -> None:
        self.open[handoff_id].set_result(None)

    def fail(self, handoff_id: str, error: ServingError) -> None:
        self.open[handoff_id].set_exception(error)


def make_remote_request(handoff_id: str = "h1") -> RemoteRequest:
    return RemoteRequest(
        handoff_id=handoff_id,
        request_id="r",
        attempt=1,
        token_ids=[1, 2, 3],
        num_prompt=3,
        params=SamplingParams(),
        seed=0,
        cache_salt="",
        skip=0,
        fingerprint="f",
        decode=Peer("decode-m-1", "tcp://127.0.0.1:9", 7),
    )


def status(engine_id: str, fingerprint: str = "f", queued_tokens: int = 0) -> EngineStatus:
    stats = engine_stats(queued_tokens=queued_tokens)
    return EngineStatus(engine_id=engine_id, ended=[], stats=stats, last_step_age_s=0.0, fingerprint=fingerprint)
