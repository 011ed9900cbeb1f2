"""Control side of one engine: starts and ends its requests, and checks its health. Uses no sockets and no Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.pools import ReplicaStatus
from deployments.replicas.remote_dispatcher import RemoteDispatcher, RemotePool
from engine.distributed.refusals import REFUSALS, add_up
from engine.errors import EngineUnavailable, RequestTimeout
from engine.wire.messages import Answer, Command, Drain, EngineStatus, Notice, Question
from engine.wire.parts.handoffs import CancelDispatch, DispatchRemote, MoveRequests, SetRole
from engine.wire.stats.handoff_stats import PeerPool, Role

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0  # of `until_unhealthy`
MAX_FAILED_POLLS = 3  # in a row: after this process itself was paused, statuses are still waiting to be read
TIMEOUT_GRACE_S = 5.0  # for the engine to end a late request itself


class EngineControl:
    """One engine as its replica sees it.

    A call stays open as long as its request lives in the engine, so the number of calls is the number of requests.
    """

    def __init__(
        self,
        stall_timeout_s: float = 10.0,
        peers: Mapping[PeerPool, RemotePool] | None = None,
        node: str = "",
    ):
        """stall_timeout_s: seconds without a step while work is queued, or without any status, after which the engine
        counts as hung. peers: pools that can compute prompts or encode images for the engine. node: as in
        ReplicaStatus."""
        self._stall_timeout_s, self._node = stall_timeout_s, node
        self._dispatchers = {
            kind: RemoteDispatcher(pool, self._send, kind, self._ended_elsewhere)
            for kind, pool in (peers or {}).items()
        }
        self._calls: dict[str, asyncio.Future[None]] = {}
        self._num_answers = 0
        self._call_ids = count()
        self._questions: dict[str, asyncio.Future[bytes]] = {}
        self._broken: str | None = None
        self._refuses: str | None = None
        self._status: EngineStatus | None = None
        self._status_at = self._now()

    def send(self, command: bytes) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start to tell the engine which engines can compute for it."""
        for dispatcher in self._dispatchers.values():
            dispatcher.start(self.status)

    def close(self) -> None:
        """End the calls made for the engine."""
        for dispatcher in self._dispatchers.values():
            dispatcher.close()

    async def run_request(self, request: EncodedRequest) -> None:
        """Start a request in the engine, and return when it has ended there, for any reason. A RemoteRequest has ended
        when its handoff has.

        Tokens and KV do not pass through this call. If the call is cancelled, the engine drops the request at once.
        Raises EngineUnavailable if the engine breaks.
        """
        name, timeout_s = request.request_id, request.timeout_s
        if reason := self._broken or self._refuses:
            raise EngineUnavailable(reason)
        assert name not in self._calls, name
        ended = asyncio.get_running_loop().create_future()
        self._calls[name] = ended
        self._num_answers += not request.of_other_engine
        limit_s = None if timeout_s is None else timeout_s + TIMEOUT_GRACE_S
        try:
            self.send(request.start)
            async with asyncio.timeout(limit_s):
                await ended
        except asyncio.CancelledError:
            self.send(request.cancel)
            raise
        except TimeoutError:
            self.send(request.cancel)
            raise RequestTimeout(name, limit_s or 0.0) from None
        finally:
            self._calls.pop(name)
            self._num_answers -= not request.of_other_engine

    async def run_requests(self, requests: Sequence[EncodedRequest]) -> None:
        """Run all requests, and return when all have ended. If one fails, its error is raised and the others are
        dropped."""
        if len(requests) == 1:
            await self.run_request(requests[0])
            return
        try:
            async with asyncio.TaskGroup() as calls:
                for request in requests:
                    calls.create_task(self.run_request(request))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def ask(self, question: Question, timeout_s: float | None = None) -> bytes:
        """Ask the engine, and return its answer in msgpack. timeout_s: None to wait as long as the engine lives. Raises
        EngineUnavailable."""
        if self._broken is not None:
            raise EngineUnavailable(self._broken)
        call_id = str(next(self._call_ids))
        answer = self._questions[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(msgspec.structs.replace(question, call_id=call_id))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable(f"the engine has not answered within {timeout_s:g} s") from None
        finally:
            del self._questions[call_id]

    def tell(self, command: Command) -> None:
        """Send a command that has no answer. Raises EngineUnavailable if the engine is unhealthy."""
        self.check_health()
        self._send(command)

    @property
    def num_answers(self) -> int:
        """Number of unfinished requests that the engine answers; prompts for other engines do not count."""
        return self._num_answers

    def move_requests(self, count: int) -> None:
        """Move up to `count` running requests to other engines."""
        self._send(MoveRequests(count))

    def set_role(self, role: Role) -> None:
        """Give the engine a role, which it tells the routers."""
        self._send(SetRole(role))

    def refuse(self, reason: str) -> None:
        """Refuse new calls with EngineUnavailable, and tell the routers. Open calls continue."""
        self._refuses = reason
        self._send(Drain())

    @property
    def hangs(self) -> bool:
        """Whether the engine is silent or makes no progress, although nobody knows it to be gone."""
        try:
            self.check_health()
        except EngineUnavailable:
            return self._broken is None
        return False

    def fail(self, reason: str, doing: Sequence[str] = ()) -> None:
        """End all open calls with EngineUnavailable, and refuse new ones, because the engine is gone. doing: as for
        EngineUnavailable."""
        self._broken = reason
        self.close()
        open_calls: list[asyncio.Future[Any]] = [*self._calls.values(), *self._questions.values()]
        for ended in open_calls:
            if not ended.done():
                ended.set_exception(EngineUnavailable(reason, doing))

    def check_health(self) -> None:
        """Raise EngineUnavailable if the engine is gone, silent, or makes no progress."""
        if self._broken is not None:
            raise EngineUnavailable(self._broken)
        silent_s = self._now() - self._status_at
        if silent_s > self._stall_timeout_s:
            raise EngineUnavailable(f"no status from the engine for {silent_s:.0f} s")
        if self._status is not None and self._status.last_step_age_s > self._stall_timeout_s:
            raise EngineUnavailable(f"work is queued, but no step ended for {self._status.last_step_age_s:.0f} s")

    async def until_unhealthy(self) -> str:
        """Wait until `check_health` has raised MAX_FAILED_POLLS times in a row. Returns what is wrong."""
        failures = 0
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                self.check_health()
                failures = 0
            except EngineUnavailable as error:
                failures += 1
                if failures == MAX_FAILED_POLLS:
                    return str(error)

    def status(self) -> ReplicaStatus:
        """Return the newest status. Raises EngineUnavailable if the engine is unhealthy or has not reported yet."""
        self.check_health()
        if self._status is None:
            raise EngineUnavailable("the engine has just started")
        routing = {kind: dispatcher.pool.routing for kind, dispatcher in self._dispatchers.items()}
        refused = add_up(self._status.refused, REFUSALS.counts())  # of the engine's processes, and of this one
        return ReplicaStatus.of(msgspec.structs.replace(self._status, refused=refused), routing, self._node)

    def handle(self, notice: Notice) -> None:
        if isinstance(notice, EngineStatus):
            self._update(notice)
        elif isinstance(notice, Answer):
            if (asked := self._questions.get(notice.call_id)) is not None and not asked.done():
                asked.set_result(notice.answer)
        elif isinstance(notice, DispatchRemote) and notice.pool in self._dispatchers:
            self._dispatchers[notice.pool].dispatch(notice.request)
        elif isinstance(notice, CancelDispatch) and self._dispatchers:
            for dispatcher in self._dispatchers.values():
                dispatcher.cancel(notice.handoff_id)
        else:
            REFUSALS.add("engine_notices", "unexpected", f"{type(notice).__name__}: this replica has no such pool")

    def _ended_elsewhere(self, request_id: str, error: EngineUnavailable) -> None:
        """End the call of a request if an engine of another replica has ended with it, so that its ingress knows."""
        if (ended := self._calls.get(request_id)) is not None and not ended.done():
            ended.set_exception(error)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _update(self, status: EngineStatus) -> None:
        self._status, self._status_at = status, self._now()
        for request_id in status.ended:
            ended = self._calls.get(request_id)
            if ended is not None and not ended.done():
                ended.set_result(None)

    def _send(self, command: Command) -> None:
        self.send(msgspec.msgpack.encode(command))
