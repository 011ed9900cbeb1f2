"""Several engines that share experts, used like one EngineCore: the first in this process, the others in children.

With `enable_elastic_ep` the others go on if an engine in a child dies, and take over its requests. An engine dies with
any of its ranks.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import zmq

from engine.assembly.build import build_engine
from engine.assembly.open_worker import open_worker
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.data_parallel.roster import Roster
from engine.distributed.sockets import PullSocket, PushSockets
from engine.distributed.tp_group import ConnectedGroup
from engine.errors import EngineUnavailable
from engine.runner.worker import Worker
from engine.serving.server import EngineServer
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Abort, Add, Command, EngineStatus, Notice, kinds_of
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import TokenBatch, TokenDelta

HOST = "127.0.0.1"
POLL_MS = 50  # how soon the loss of an engine is noticed while only others compute


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """Output of a step for one request."""

    delta: TokenDelta


@dataclass(slots=True)
class LiveRequest:
    """A request that an engine computes."""

    message: GenerateRequest
    engine: int
    output: list[int] = field(default_factory=list)


class Inbox:
    """Where the engines in children send tokens, and their states."""

    def __init__(self, key: ClusterKey | None):
        self.context = zmq.Context()
        self.tokens: PullSocket[TokenBatch] = PullSocket(self.context, HOST, TokenBatch, name="tokens", key=key)
        self.notices: PullSocket[Notice] = PullSocket(
            self.context, HOST, kinds_of(Notice), name="engine_notices", key=key
        )


def start_engines(config: EngineConfig, ranks: ConnectedGroup) -> EngineGroup:
    """Load the first rank of the first engine, and wait for the others. ranks: all ranks of all engines, joined. Raises
    StartupError."""
    inbox = Inbox(ranks.key)
    try:
        ranks.exchange(inbox.notices.address)
        group = DataParallelGroup(ranks, config.num_ranks, config.pipeline_parallel_size)
        core = build_engine(config, group)
        elastic = config.enable_elastic_ep
        roster = Roster(group.waves.addresses, ranks.key, config.num_ranks) if elastic else None
        return EngineGroup(core, ranks, inbox, config.num_ranks, roster)
    except BaseException:
        inbox.context.destroy(linger=0)
        raise


def start_rank(config: EngineConfig, ranks: ConnectedGroup) -> EngineServer | Worker:
    """Load the rank of a child: a server on the first rank of an engine, else a worker. Waits for the others. Raises
    StartupError."""
    status_to = ranks.exchange("")[0]
    group = DataParallelGroup(ranks, config.num_ranks, config.pipeline_parallel_size)
    if group.rank:
        worker = open_worker(config, group, ranks.host)
        ranks.exchange("")
        return worker
    name = engine_name(group.engine)
    server = EngineServer(config, engine_id=name, status_to=status_to, host=ranks.host, group=group)
    ranks.exchange(server.address)
    return server


def engine_name(number: int) -> str:
    return f"engine {number}"


class EngineGroup:
    """Gives each request to the engine with the fewest. Used by one thread."""

    def __init__(
        self,
        core: EngineCore,
        ranks: ConnectedGroup,
        inbox: Inbox,
        ranks_per_engine: int,
        roster: Roster | None = None,
    ):
        """core: the first engine. ranks: all ranks of all engines. roster: tells engines to go on if one dies; None if
        they end together. Waits until all engines have loaded. Raises StartupError."""
        self._core, self._inbox, self._roster = core, inbox, roster
        self.max_model_len = core.max_model_len
        self._addresses, self._width = ranks.exchange("")[::ranks_per_engine], ranks_per_engine
        self._peers = PushSockets(inbox.context, key=ranks.key)
        self._live: dict[str, LiveRequest] = {}  # by request id
        #: Engine in a child, and number of its aborted requests whose last delta is still to come, by request id.
        self._aborted: dict[str, tuple[int, int]] = {}
        engines = range(len(self._addresses))
        self._numbers = dict.fromkeys(engines, 0)  # of live requests, by engine
        self._names = {engine_name(engine) for engine in engines[1:]}  # of those in children that live
        self._losses: queue.SimpleQueue[int] = queue.SimpleQueue()  # engines whose requests are to be computed again
        self._stats: dict[str, EngineStats] = {}
        self._lost: str | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        ranks.on_abort(self._end)
        ranks.on_loss(self._lose)

    def check(self, message: GenerateRequest) -> None:
        """As in EngineCore."""
        self._core.check(message)

    def add(self, message: GenerateRequest) -> None:
        """Take a request, or raise a ServingError. Engines in children report errors later, in deltas."""
        # an aborted request with this id may still be answered: then the same engine answers this one, afterwards
        engine, _ = self._aborted.get(message.request_id, (self._idlest(), 0))
        self._start(message, engine)
        self._live[message.request_id] = LiveRequest(message, engine)
        self._numbers[engine] += 1

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> list[StepOutput]:
        """End a request, if it is live. Its last delta is returned only by the first engine."""
        engine = self._forget(request_id)
        if engine is None:
            return []
        if engine:
            self._send(engine, Abort(request_id, reason))
            self._aborted[request_id] = engine, self._aborted.get(request_id, (engine, 0))[1] + 1
            return []
        return [StepOutput(event.delta) for event in self._core.abort(request_id, reason)]

    def step(self) -> list[StepOutput]:
        """Take a step in this process, if there is one, and return what all engines have answered since the last call.
        Raises EngineUnavailable if an engine is lost."""
        if self._lost is not None:
            raise EngineUnavailable(self._lost)
        if not self._core.has_work:
            self._inbox.tokens.socket.poll(POLL_MS)
        deltas = [event.delta for event in self._core.step()]
        for batch in self._inbox.tokens.messages():
            if batch.engine_id in self._names:  # else it has died, and others compute its requests again
                deltas += [delta for delta in batch.deltas if not self._is_late(delta)]
        for delta in deltas:
            if (request := self._live.get(delta.request_id)) is not None:
                request.output += delta.token_ids
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
        while not self._losses.empty():
            self._replay(self._losses.get())
        return [StepOutput(delta) for delta in deltas]

    def stats(self) -> EngineStats:
        """Return the state of the first engine."""
        return self._core.stats()

    def all_stats(self) -> list[EngineStats]:
        """Return the state of each engine. Those in children report it once a second."""
        for notice in self._inbox.notices.messages():
            if isinstance(notice, EngineStatus):
                self._stats[notice.engine_id] = notice.stats
        return [self._core.stats(), *(self._stats[name] for name in sorted(self._stats.keys() & self._names))]

    def close(self) -> None:
        """End the first engine. The children end with their pipes."""
        self._core.close()
        self._inbox.context.destroy(linger=0)
        if self._roster is not None:
            self._roster.close()

    def _idlest(self) -> int:
        return min(self._numbers, key=lambda engine: self._numbers[engine])

    def _start(self, message: GenerateRequest, engine: int) -> None:
        if engine == 0:
            self._core.add(message)
        else:
            self._send(engine, Add(msgspec.structs.replace(message, reply_to=self._inbox.tokens.address)))

    def _replay(self, engine: int) -> None:
        """Let other engines compute the requests of an engine that has died, if this is not known yet."""
        if self._numbers.pop(engine, None) is None:
            return
        self._names.remove(engine_name(engine))
        self._aborted = {name: aborted for name, aborted in self._aborted.items() if aborted[0] != engine}
        for request in [request for request in self._live.values() if request.engine == engine]:
            request.engine = self._idlest()
            self._numbers[request.engine] += 1
            again = request.message.continued(request.output)  # its seed comes from its id, and so stays the same
            self._start(again, request.engine)

    def _send(self, engine: int, command: Command) -> None:
        self._peers.send(self._addresses[engine], self._encode(command))

    def _forget(self, request_id: str) -> int | None:
        request = self._live.pop(request_id, None)
        if request is None:
            return None
        self._numbers[request.engine] -= 1
        return request.engine

    def _is_late(self, delta: TokenDelta) -> bool:
        """Whether a delta from a child answers an aborted request, not a later one with the same id."""
        if (aborted := self._aborted.get(delta.request_id)) is None:
            return False
        if delta.finish_reason is not None:
            engine, count = aborted
            if count > 1:
                self._aborted[delta.request_id] = engine, count - 1
            else:
                del self._aborted[delta.request_id]
        return True

    def _end(self, reason: str) -> None:
        self._lost = reason

    def _lose(self, rank: int, reason: str) -> bool:
        """Take note that a rank has died, and with it its engine, in any thread. Returns whether the others go on."""
        engine = rank // self._width
        if self._roster is None or engine == 0:
            return False
        self._losses.put(engine)
        return self._roster.lose(engine, reason)
