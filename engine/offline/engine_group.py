"""Several engines that share experts, used like one EngineCore: the first in this process, the others in children.

If one of them dies, all end.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import msgspec
import zmq

from engine.assembly.build import build_engine
from engine.assembly.open_worker import open_worker
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
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
POLL_MS = 50  # how soon the end of an engine is noticed while only others compute


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """Output of a step for one request."""

    delta: TokenDelta


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
    with ExitStack() as opened:
        opened.callback(inbox.context.destroy, linger=0)
        ranks.exchange(inbox.notices.address)
        group = DataParallelGroup(ranks, config.num_ranks, config.pipeline_parallel_size)
        core = build_engine(config, group, engine_id=engine_name(0))
        opened.callback(core.journal.close)
        engines = EngineGroup(core, ranks, inbox, config.num_ranks)
        opened.pop_all()
    return engines


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
    with ExitStack() as opened:
        opened.callback(server.journal.close)
        ranks.exchange(server.address)
        opened.pop_all()
    return server


def engine_name(number: int) -> str:
    return f"engine {number}"


class EngineGroup:
    """Gives each request to the engine with the fewest. Used by one thread."""

    def __init__(self, core: EngineCore, ranks: ConnectedGroup, inbox: Inbox, ranks_per_engine: int):
        """core: the first engine. ranks: all ranks of all engines. Waits until all engines have loaded. Raises
        StartupError."""
        self._core, self._inbox = core, inbox
        self.max_model_len = core.max_model_len
        self._addresses = ranks.exchange("")[::ranks_per_engine]
        self._peers = PushSockets(inbox.context, key=ranks.key)
        self._live: dict[str, int] = {}  # engine by request id
        #: Engine in a child, and number of its aborted requests whose last delta is still to come, by request id.
        self._aborted: dict[str, tuple[int, int]] = {}
        engines = range(len(self._addresses))
        self._numbers = dict.fromkeys(engines, 0)  # of live requests, by engine
        self._stats: dict[str, EngineStats] = {}
        self._lost: str | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        ranks.on_abort(self._end)

    def check(self, message: GenerateRequest) -> None:
        """As in EngineCore."""
        self._core.check(message)

    def add(self, message: GenerateRequest) -> None:
        """Take a request, or raise a ServingError. Engines in children report errors later, in deltas."""
        # an aborted request with this id may still be answered: then the same engine answers this one, afterwards
        engine, _ = self._aborted.get(message.request_id, (self._idlest(), 0))
        if engine == 0:
            self._core.add(message)
        else:
            self._send(engine, Add(msgspec.structs.replace(message, reply_to=self._inbox.tokens.address)))
        self._live[message.request_id] = engine
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
            deltas += [delta for delta in batch.deltas if not self._is_late(delta)]
        for delta in deltas:
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
        return [StepOutput(delta) for delta in deltas]

    def stats(self) -> EngineStats:
        """Return the state of the first engine."""
        return self._core.stats()

    def all_stats(self) -> list[EngineStats]:
        """Return the state of each engine. Those in children report it once a second."""
        for notice in self._inbox.notices.messages():
            if isinstance(notice, EngineStatus):
                self._stats[notice.engine_id] = notice.stats
        return [self._core.stats(), *(self._stats[name] for name in sorted(self._stats))]

    def close(self) -> None:
        """End the first engine. The children end with their pipes."""
        self._core.close()
        self._inbox.context.destroy(linger=0)

    def _idlest(self) -> int:
        return min(self._numbers, key=lambda engine: self._numbers[engine])

    def _send(self, engine: int, command: Command) -> None:
        self._peers.send(self._addresses[engine], self._encode(command))

    def _forget(self, request_id: str) -> int | None:
        engine = self._live.pop(request_id, None)
        if engine is not None:
            self._numbers[engine] -= 1
        return engine

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
