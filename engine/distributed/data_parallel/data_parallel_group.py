"""Data-parallel engines: several engines, each with its own requests and KV, that share the experts of one model.

Rank r of the group of all ranks is rank r % size of engine r // size. This group exchanges rows of mixture layers
(exchange/), and wakes engines that have nothing to compute. For everything else an engine is alone, with its own
tensor-parallel group.

Engines may have pipeline stages. Then the ranks of the same stage in all engines share that stage's experts, and step
together. They never wait for another stage, except for the one before it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from engine.config import EngineConfig
from engine.distributed.data_parallel.roster import Message
from engine.distributed.exchange.expert_exchange import ExpertExchange
from engine.distributed.part_group import CONNECT_TIMEOUT_S, PartGroup
from engine.distributed.sockets import PullSocket, PushSockets, Waker
from engine.distributed.tp_group import LOADING_TIMEOUT_S, ConnectedGroup, TPGroup

logger = logging.getLogger(__name__)

NAME = "waves"  # name of the socket in metrics


class DataParallelGroup(PartGroup):
    """The ranks of one of several engines. Its start and its end are those of all engines."""

    all_engines: ConnectedGroup
    expert_ranks: ConnectedGroup

    def __init__(self, all_engines: ConnectedGroup, size: int = 1, stages: int = 1):
        """Connect the ranks of each engine, and the engines. size: ranks of an engine, of all its stages. Every rank
        has to call this at the same time. Raises StartupError."""
        super().__init__(all_engines, size)
        self.engine, self._width, self.has_stages = self.number, size // stages, stages > 1
        self._stage, self._place = divmod(self.rank, self._width)
        with self.starting():
            self._connect(all_engines)
            hosts = self.expert_ranks.on_hosts(CONNECT_TIMEOUT_S)
            self.expert_exchange: ExpertExchange = ExpertExchange(self.expert_ranks, hosts, self._width)
            self.waves = Waves(self.expert_ranks)
        self.local_size = self.own.local_size

    @property
    def leads(self) -> bool:
        """Whether the other ranks of its stage, or of its engine, launch the steps that this one launches."""
        return self._place == 0

    def exchange(self, value: str, timeout_s: float = LOADING_TIMEOUT_S) -> list[str]:
        return self.own.exchange(value, timeout_s)

    def use(self, all_engines: ConnectedGroup) -> None:
        """Connect the ranks of this engine, and share experts with these engines from now on. Every rank has to call
        this at the same time. Raises StartupError, or EngineUnavailable if a rank is lost meanwhile."""
        self._connect(all_engines)
        self.expert_exchange.use(self.expert_ranks, self.expert_ranks.on_hosts(CONNECT_TIMEOUT_S))

    def _connect(self, all_engines: ConnectedGroup) -> None:
        self.all_engines = self._whole = self.expert_ranks = all_engines
        self.connect_own(f"engine {self.engine}", collectives=not self.has_stages)
        if self.has_stages:
            engines, width = all_engines.size // self.size, self._width
            rank, size = self.engine * width + self._place, engines * width
            self.expert_ranks = all_engines.part(f"experts of stage {self._stage}", rank, size)
            self.expert_ranks.join(CONNECT_TIMEOUT_S)

    def close(self) -> None:
        self.waves.close()
        super().close()


class Waves:
    """Messages by which an engine that has something to compute wakes the others and its own other ranks, and by which
    engines learn that one of them is lost (survivors.py)."""

    def __init__(self, engines: ConnectedGroup):
        """Every rank of every engine has to create its end at the same time."""
        self._context = zmq.Context()
        self._inbox: PullSocket[Message] = PullSocket(self._context, engines.host, Message, name=NAME, key=engines.key)
        self._encode = msgspec.msgpack.Encoder().encode
        self._end, self._closing = Waker(), False
        self._listener: threading.Thread | None = None
        #: Where each rank takes messages, by its number.
        self.addresses = engines.exchange(self._inbox.address)
        self._own = engines.rank
        self.members = list(range(engines.size))  #: numbers of the ranks that have not been lost
        self._peers = PushSockets(self._context, key=engines.key)
        for number in self._others:
            self._peers.connect(self.addresses[number])

    @property
    def _others(self) -> list[int]:
        return [number for number in self.members if number != self._own]

    def tell(self, message: Message) -> None:
        """Send a message to all other members. Called by one thread."""
        encoded = self._encode(message)
        with suppress(zmq.ZMQError):  # the engine ends, and its sockets are closed
            for number in self._others:
                self._peers.send(self.addresses[number], encoded)

    def listen(self, call: Callable[[Message], None]) -> None:
        """Call a function, in another thread, for every message."""

        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._end, zmq.POLLIN)

        def receive() -> None:
            while not self._closing:
                poller.poll()
                for message in self._inbox.messages():
                    call(message)

        self._listener = threading.Thread(target=receive, name="waves", daemon=True)
        self._listener.start()

    def close(self) -> None:
        self._closing = True
        self._end.wake()
        if self._listener is not None:
            self._listener.join()
        self._end.close()
        self._context.destroy(linger=0)


def engine_group(config: EngineConfig, ranks: TPGroup) -> TPGroup:
    """Return the ranks of this rank's engine. ranks: all ranks that have joined. Every rank has to call this at the
    same time. Raises StartupError."""
    if config.data_parallel_size == 1:
        return ranks
    assert isinstance(ranks, ConnectedGroup)
    return DataParallelGroup(ranks, config.num_ranks, config.pipeline_parallel_size)
