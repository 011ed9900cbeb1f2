"""A real prefill engine and a real decode engine; the test plays their control actors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec
import zmq

from engine.config import EngineConfig
from engine.distributed.group_options import group_options
from engine.distributed.tp_group import TPGroup
from engine.serving.server import EngineServer
from engine.wire.messages import Command, EngineStatus, Notice, kinds_of
from engine.wire.parts.handoffs import CancelDispatch, CancelPrefill, DispatchRemote, Prefill, RemoteRequestFailed
from engine.wire.parts.holds import HoldStats
from engine.wire.remote_request import RemoteRequest
from tests.engine_sockets import LIMIT_MS, Ingress, ServerThread, bind
from tests.rank_pool import TIMEOUT_S, RankPool, run_worker

POLL_MS = 20


class Engine:
    """An EngineServer in a thread, its ranks above 0 in processes, and what it tells its control actor."""

    def __init__(self, context: zmq.Context, config: EngineConfig, name: str, ranks: RankPool):
        self.config, self._ranks = config, ranks
        self.inbox = context.socket(zmq.PULL)
        status_to = bind(self.inbox)
        size, group = config.num_ranks, None
        if size > 1:
            options = {**group_options(config), "device": "cpu"}
            group = TPGroup.listen(size, **options)
            for rank in range(1, size):
                ranks.call(rank, run_worker, config, rank, group.address, options)
            group.join(TIMEOUT_S)
        self.server = EngineServer(config, engine_id=name, status_to=status_to, group=group)
        self.commands = context.socket(zmq.PUSH)
        self.commands.connect(self.server.address)
        self.status: EngineStatus | None = None
        self.ended: set[str] = set()
        self.thread = ServerThread(self.server)

    def send(self, command: Command) -> None:
        self.commands.send(msgspec.msgpack.encode(command))

    def stop(self) -> None:
        self.thread.stop()
        for rank in range(1, self.config.num_ranks):
            self._ranks.answer(rank)
        if self.thread.error is not None:
            raise self.thread.error

    @property
    def scheduler(self):
        return self.server._core.scheduler

    def forget(self) -> None:
        """Empty its prefix cache. It must have nothing to do."""
        self.scheduler.kv_cache.pool.clear_cache()


class Pair:
    """forwards: whether prefill requests are taken to prefill at once, or kept in `held`. fails: none is taken."""

    def __init__(self, decode: EngineConfig, prefill: EngineConfig, ranks: Sequence[RankPool], *more: EngineConfig):
        """ranks: for each engine. more: decode engines beside the first."""
        self._context = zmq.Context()
        self.decode = Engine(self._context, decode, "decode", ranks[0])
        self.prefill = Engine(self._context, prefill, "prefill", ranks[1])
        self.engines = [self.decode, self.prefill]
        for i, (config, pool) in enumerate(zip(more, ranks[2:], strict=True), 2):
            self.engines.append(Engine(self._context, config, f"decode {i}", pool))
        self.ingress = Ingress(self._context, self.decode.server)
        self.forwards, self.fails = True, False
        self.held: list[RemoteRequest] = []
        self.remote_requests: list[RemoteRequest] = []
        self.dropped: set[str] = set()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._control = threading.Thread(target=self._run, name="control")
        self._control.start()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        try:
            for engine in self.engines:
                if engine.thread.is_alive():
                    engine.stop()
        finally:
            self._closing.set()
            self._control.join()
            self._context.destroy(linger=0)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, LIMIT_MS / 1000), "it did not come to that"

    def settle(self) -> None:
        """Wait until neither engine holds anything; then the books must balance. Older statuses do not count."""
        with self._changed:
            for engine in self.engines:
                engine.status = None
        self.wait_for(lambda: all(is_empty(e.status) for e in self.engines if e.thread.is_alive()))
        for engine in self.engines:
            if engine.thread.is_alive():
                engine.scheduler.check()

    def release_prefill_requests(self) -> None:
        with self._changed:
            self.forwards = True
            for remote_request in self.held:
                self._forward(remote_request)
            self.held.clear()

    def forget(self) -> None:
        """Empty all prefix caches."""
        self.settle()
        for engine in self.engines:
            engine.forget()

    # -- the control actors --------------------------------------------------------------------------------

    def _run(self) -> None:
        decode = msgspec.msgpack.Decoder(kinds_of(Notice)).decode
        poller = zmq.Poller()
        for engine in self.engines:
            poller.register(engine.inbox, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            for engine in self.engines:
                if engine.inbox in ready:
                    with self._changed:
                        self._handle(engine, decode(engine.inbox.recv()))
                        self._changed.notify_all()

    def _handle(self, engine: Engine, notice: Notice) -> None:
        match notice:
            case EngineStatus():
                engine.status = notice
                engine.ended |= set(notice.ended)
            case DispatchRemote(remote_request):
                self.remote_requests.append(remote_request)
                if self.fails:
                    engine.send(RemoteRequestFailed(remote_request.handoff_id, "nobody there", True))
                elif self.forwards:
                    self._forward(remote_request)
                else:
                    self.held.append(remote_request)
            case CancelDispatch(handoff_id):
                self.dropped.add(handoff_id)
                self.prefill.send(CancelPrefill(handoff_id))

    def _forward(self, remote_request: RemoteRequest) -> None:
        self.prefill.send(Prefill(remote_request))


def is_empty(status: EngineStatus | None) -> bool:
    if status is None:
        return False
    stats = status.stats
    busy = stats.running + stats.waiting + stats.receiving + stats.leased
    holds = stats.record(HoldStats)
    return (
        busy == 0
        and stats.blocks_used == (holds.device_blocks if holds else 0)
        and not (status.handoffs and status.handoffs.live)
    )
