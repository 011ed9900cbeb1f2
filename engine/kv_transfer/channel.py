"""Thread and sockets of the handoff protocol, separate from the step loop. See endpoint.py and protocol/protocol.py."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence

import zmq

from engine.distributed.cluster_key import ClusterKey
from engine.distributed.refusals import Counts
from engine.distributed.sockets import PullSocket, PushSockets, Waker
from engine.kv_transfer.endpoint import CLOSE_S, MAX_WAIT_S, HandoffEndpoint
from engine.kv_transfer.protocol.messages import Envelope, KVWorkerAnswer
from engine.kv_transfer.protocol.protocol import HandoffProtocol
from engine.kv_transfer.transport.ranks import KVWorkerInfo
from engine.options.handoff import HandoffConfig
from engine.wire.handoff import HandoffAction, HandoffEvent, Leave
from engine.wire.remote_request import Peer
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats

logger = logging.getLogger(__name__)

LINGER_MS = 200  # that `close` waits for the last messages to leave
MAX_QUEUED_MESSAGES = 1000  # per peer that does not take them; the protocol tolerates the loss of further ones
# in ms: connections over a broken link are detected, and replaced
PING: dict[int, int] = {zmq.HEARTBEAT_IVL: 1000, zmq.HEARTBEAT_TIMEOUT: 5000}


class HandoffChannel:
    """Handoffs of one engine, at its rank 0.

    All methods may be called from any thread; only `close` blocks.
    """

    def __init__(
        self,
        config: HandoffConfig,
        *,
        engine_id: str,
        host: str,
        workers: Sequence[KVWorkerInfo],
        block_size: int,
        wake: Callable[[], None],
        key: ClusterKey | None = None,
    ):
        """workers: KV workers of all ranks, in rank order.
        wake: function called from the channel's thread when `events` has something new; must not block.
        key: cluster key, shared with the KV workers and all other engines."""
        self._context = zmq.Context()
        self._inbox: PullSocket[Envelope] = PullSocket(self._context, host, Envelope, name="handoffs", key=key)
        self._answers: PullSocket[KVWorkerAnswer] = PullSocket(  # from this engine's KV workers
            self._context, host, KVWorkerAnswer, name="kv_worker_answers", key=key
        )
        self.peer = Peer(engine_id, self._inbox.address, random.SystemRandom().getrandbits(64))
        self._peers = PushSockets(self._context, PING | {zmq.SNDHWM: MAX_QUEUED_MESSAGES}, key)
        self._workers = PushSockets(self._context, PING, key)
        self._worker_addresses = [worker.address for worker in workers]
        ranks = [worker.description for worker in workers]
        self._endpoint = HandoffEndpoint(
            HandoffProtocol(config, self.peer, ranks=ranks, block_size=block_size),
            answers_to=self._answers.address,
            send=self._send,
            command=self._command,
            wake=wake,
        )
        self._lock = threading.Lock()  # guards _endpoint
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name=f"handoff-channel {engine_id}", daemon=True)
        self._thread.start()

    def submit(self, *actions: HandoffAction) -> None:
        """Queue actions for the protocol to apply in order. The messages that result from one call are sent
        together."""
        self._endpoint.submit(*actions)
        self._waker.wake()

    def events(self) -> list[HandoffEvent]:
        """Return the events since the last call.

        Raises EngineUnavailable if this engine must end: the channel's thread has died, or a rank did not stop writing
        into blocks, so that these blocks can never be used again.
        """
        return self._endpoint.events()

    def quarantined(self) -> list[str]:
        """Return the ids of engines that should get no prefill requests for now."""
        with self._lock:
            return self._endpoint.quarantined()

    def snapshot(self) -> list[HandoffInfo]:
        with self._lock:
            return self._endpoint.snapshot()

    def stats(self) -> HandoffStats:
        with self._lock:
            return self._endpoint.stats()

    def refused_by_ranks(self) -> Counts:
        """Return the counts of messages refused by ranks above 0. These ranks report them only to this channel."""
        with self._lock:
            return self._endpoint.refused_by_ranks()

    def close(self) -> None:
        """Notify the peers, stop all reads, and end the thread, within about two seconds. No further events come."""
        self.submit(Leave())
        self._thread.join(CLOSE_S + 2 * LINGER_MS / 1000 + MAX_WAIT_S)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # whatever it is: the step loop must not wait for handoffs forever
            logger.exception("the handoff channel has failed")
            self._endpoint.fail(f"the handoff channel has failed: {error!r}")
        finally:
            self._context.destroy(linger=LINGER_MS)
            self._waker.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._inbox.socket, self._answers.socket, self._waker):
            poller.register(source, zmq.POLLIN)
        self._endpoint.flush()
        while not self._endpoint.ended:
            wait_ms = int(1000 * self._endpoint.wait_s()) + 1  # + 1: wake after the due time, never just before it
            ready = dict(poller.poll(wait_ms))
            if self._waker.fileno() in ready:
                self._waker.clear()
            with self._lock:
                self._endpoint.serve(self._answers.messages(), self._inbox.messages())
                self._peers.forget_unused()

    def _command(self, data: bytes) -> None:
        for worker in self._worker_addresses:
            self._workers.send(worker, data)

    def _send(self, address: str, data: bytes) -> None:
        try:
            self._peers.send(address, data)  # if it is lost, the protocol repeats it or gives up
        except zmq.ZMQError as error:
            self._inbox.refuse("unexpected", f"cannot send to {address!r}: {error}")
