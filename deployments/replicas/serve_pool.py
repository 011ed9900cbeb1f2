"""Replicas of one model on Serve. All calls from ingresses and decode replicas to these replicas are made here."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments import ray_compat
from deployments.carried import Carried
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.pools import A, ReplicaQuestion, ReplicaStatus
from deployments.replicas.remote_dispatcher import PoolState
from deployments.routing.choice_observer import ChoiceObserver
from deployments.routing.config import Role
from deployments.routing.prompt_digest import PromptDigest, PromptDigester
from deployments.routing.routing_context import CallOutcome, RoutingContext
from deployments.routing.stats import RoutingStats
from engine.errors import EngineUnavailable, Overloaded, ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Command, Question
from engine.wire.parts.adapter import ModelAdapter, digest_of
from engine.wire.parts.images import images_in
from engine.wire.remote_request import RemoteRequest
from engine.wire.stats.handoff_stats import PeerPool

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 3.0
TELL_S, TELL_PAUSE_S = 10.0, 0.25  # for which a command is repeated until all replicas have it, and between two tries
CALL_S = 1.0  # for a call to a replica, besides the time of its engine
AT_REST = ("HEALTHY", "UPSCALING", "DOWNSCALING")


class ServePool:
    """An EnginePool of the replicas of a `Decode` deployment, and of the deployments that compute for it."""

    def __init__(
        self,
        handle: DeploymentHandle,
        peers: Mapping[PeerPool, DeploymentHandle] | None = None,
        block_size: int | None = None,
        may_sleep: bool = False,
        note: Callable[[str, str], None] | None = None,
    ):
        """peers: handles of the deployments that compute for this pool.
        block_size: tokens per KV block of the replicas; None if they share no prefixes.
        may_sleep: whether the pool can have no replicas while none is needed.
        note: function called from any thread, with each request id and a sentence that says to which replica the
        request is sent."""
        self._may_sleep, self.observer = may_sleep, ChoiceObserver()
        self.routing = RoutingStats()
        self._handle, self._peers, self._prompts = handle, peers or {}, PromptDigester(block_size)
        self._note = note

    @property
    def _all(self) -> list[DeploymentHandle]:
        return [self._handle, *self._peers.values()]

    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        first = requests[0]  # routing uses its prefix for all of them
        prompt = self._prompts.digest(
            first.request_id,
            first.prompt,
            first.cache_salt,
            first.session_id,
            images_in(first),
            digest_of(first.record(ModelAdapter)),
        )
        if len(requests) > 1:
            prompt = replace(prompt, num_tokens=sum(len(request.prompt) for request in requests))
        if first.params.prompt_logprobs is not None:
            prompt = replace(prompt, keys=())  # all of the prompt is computed, cached or not
        note = partial(self._note_all, [request.request_id for request in requests])
        call = RoutingContext(
            prompt, self.routing, avoid, first.model, note, observer=self.observer, numerics=first.numerics
        )
        with ray_compat.apart_from_http_request():
            response = self._handle.generate.remote([Carried(EncodedRequest.of(request)) for request in requests], call)
        await _answer(response, call)

    def _note_all(self, request_ids: list[str], what: str) -> None:
        if self._note is not None:
            for request_id in request_ids:
                self._note(request_id, what)

    async def statuses(self) -> list[ReplicaStatus]:
        statuses = await _statuses(self._handle)
        if not statuses:
            raise EngineUnavailable("no replica is up and healthy")
        return statuses

    async def asleep(self) -> bool:
        if not self._may_sleep:
            return False
        deployment = await _deployment_status(self._handle)
        return deployment is not None and deployment.status in AT_REST and not deployment.replica_states.get("RUNNING")

    async def ask_one(self, question: Question, kind: type[A], adapter: str = "") -> list[A]:
        prompt = PromptDigest(f"ask-{secrets.token_hex(8)}", 1, (), adapter=adapter)
        call = RoutingContext(prompt)  # it counts as no request
        answers = await _answer(self._handle.ask.remote(Carried(question), None, call), call)
        return [msgspec.msgpack.decode(answer, type=kind) for answer in answers]

    async def tell(self, command: Command, peers: bool = False) -> None:
        for handle in self._all if peers else [self._handle]:
            await self._tell(handle, command)

    async def _tell(self, handle: DeploymentHandle, command: Command) -> None:
        """Repeat a command until all replicas have it, for one that has just died is still listed for a moment."""
        until = time.monotonic() + TELL_S
        while True:
            answers = await ray_compat.broadcast(handle, "tell", STATUS_TIMEOUT_S, Carried(command))
            missing = sum(isinstance(answer, BaseException) for answer in answers)
            if not missing and (answers or await self.asleep()):
                return
            if time.monotonic() >= until:
                raise EngineUnavailable(f"{missing or 'all'} replicas did not answer; send the request again")
            await asyncio.sleep(TELL_PAUSE_S)

    async def ask(self, question: Question | ReplicaQuestion, kind: type[A], timeout_s: float) -> list[A]:
        asked = (_ask(handle, question, kind, timeout_s) for handle in self._all)
        return [answer for some in await asyncio.gather(*asked) for answer in some]

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return dict(zip(self._peers, await asyncio.gather(*map(_statuses, self._peers.values())), strict=True))


class ServeRemotePool:
    """A RemotePool of the replicas of a `Prefill` deployment, or of those replicas of a `PrefillDecode` deployment that
    compute prompts."""

    def __init__(self, handle: DeploymentHandle, block_size: int | None = None, role: Role = "prefill"):
        """block_size: as for ServePool; needed only to send prefill requests."""
        self.routing, self._role, self.observer = RoutingStats(), role, ChoiceObserver()
        self._handle, self._prompts = handle, PromptDigester(block_size)

    async def prefill(self, remote_request: RemoteRequest, avoid: list[str]) -> None:
        prompt = self._prompts.digest(
            remote_request.handoff_id,
            remote_request.token_ids,
            remote_request.cache_salt,
            images=images_in(remote_request),
            adapter=digest_of(remote_request.record(ModelAdapter)),
        )
        call = RoutingContext(prompt, self.routing, avoid=avoid, role=self._role, observer=self.observer)
        await _answer(self._handle.prefill.remote(Carried(EncodedRequest.of(remote_request)), call), call)

    async def statuses(self) -> list[ReplicaStatus]:
        return await _statuses(self._handle)

    async def ask(self, question: Question, kind: type[A], timeout_s: float) -> list[A]:
        """Ask all engines of the replicas that are up, and return the answers of those that answer. kind: of the
        answers. timeout_s: for an engine to answer."""
        deployment = await _deployment_status(self._handle)
        if deployment is None or not deployment.replica_states.get("RUNNING"):
            return []
        return await _ask(self._handle, question, kind, timeout_s)

    async def state(self) -> PoolState:
        deployment = await _deployment_status(self._handle)
        if deployment is None or deployment.status == "UPDATING":
            return "deploying"
        if not deployment.replica_states.get("RUNNING"):
            return "down"
        # Serve says so from when a replica dies during an update until the update is complete
        return "deploying" if deployment.status == "DEPLOY_FAILED" else "up"


async def _answer(response: DeploymentResponse, call: RoutingContext) -> Any:
    """Return the answer, and tell the router how the call has ended. Cancelling this coroutine cancels the call. Raises
    ServingError."""
    outcome: CallOutcome = "ended"
    try:
        answer = await response
        outcome = "answered"
        return answer
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:  # of Ray, Serve or gRPC: the call is lost
        translated = _translate(error)
        if isinstance(translated, EngineUnavailable):
            outcome = "lost"
        raise translated from error
    finally:
        call.close(outcome)


async def _ask(
    handle: DeploymentHandle, question: Question | ReplicaQuestion, kind: type[A], timeout_s: float
) -> list[A]:
    """Return the answers of all replicas of a deployment that answer."""
    found = await ray_compat.broadcast(handle, "ask", timeout_s + CALL_S, Carried(question), timeout_s)
    answers = (answer for of_replica in found if isinstance(of_replica, list) for answer in of_replica)
    return [msgspec.msgpack.decode(answer, type=kind) for answer in answers]


async def _deployment_status(handle: DeploymentHandle) -> Any:
    """Return Serve's DeploymentStatusOverview; None while there is no such deployment."""
    name = handle.deployment_id
    status = await asyncio.to_thread(serve.status)
    application = status.applications.get(name.app_name)
    return application.deployments.get(name.name) if application is not None else None


async def _statuses(handle: DeploymentHandle) -> list[ReplicaStatus]:
    answers = await ray_compat.broadcast(handle, "status", STATUS_TIMEOUT_S)
    of_replicas = [msgspec.msgpack.decode(a, type=list[ReplicaStatus]) for a in answers if isinstance(a, bytes)]
    return [status for statuses in of_replicas for status in statuses]


def _translate(error: Exception) -> ServingError:
    if isinstance(error, RayTaskError) and isinstance(error.cause, ServingError):
        return error.cause
    if isinstance(error, ServingError):
        return error
    if isinstance(error, BackPressureError):
        return Overloaded("all replicas are busy and their queues are full; send the request again later")
    if isinstance(error, TaskCancelledError):
        return EngineUnavailable("the replica is shutting down; send the request again")
    logger.warning("call to a replica failed: %r", error)
    return EngineUnavailable("the replica for this request is gone; send the request again")
