"""All that one engine needs for its handoffs, put together at rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.config import HandoffConfig
from engine.core.handoffs import Cancel, Finish, Forget, HandoffManager, Open, Refuse, Report
from engine.core.remote_prefill_policy import RemotePrefillPolicy
from engine.core.step_cost import StepCost
from engine.errors import InvalidParameter
from engine.kv_transfer.channel import HandoffChannel
from engine.kv_transfer.protocol.events import HandoffEvent
from engine.kv_transfer.transport.ranks import KVWorkerInfo
from engine.kv_transfer.transport.worker import KVTransferWorker
from engine.wire.handoff_stats import HandoffInfo, HandoffStats
from engine.wire.messages import CancelDispatch, DispatchPrefill, PrefillReplica
from engine.wire.remote_prefill import RemotePrefillRequest

logger = logging.getLogger(__name__)


class HandoffEndpoint:
    """Between the scheduler's manager and the channel. Of the step loop's thread, but for the channel's own.

    manager: for the scheduler. fingerprint: of what the KV depends on; engines whose fingerprints differ cannot use each
    other's.
    """

    def __init__(
        self,
        config: HandoffConfig,
        worker: KVTransferWorker,
        ranks: list[KVWorkerInfo],
        *,
        engine_id: str,
        host: str,
        fingerprint: str,
        block_size: int,
        step_cost: StepCost,
        wake: Callable[[], None],
    ):
        """worker: rank 0's; closed by `close`. ranks: as of start_agent. step_cost: of this engine, as learned by its
        owner. wake: see HandoffChannel."""
        self.config, self.fingerprint = config, fingerprint
        self._worker = worker
        self._channel = HandoffChannel(
            config,
            engine_id=engine_id,
            host=host,
            fingerprint=fingerprint,
            worker_addresses=[rank.address for rank in ranks],
            ranks=[rank.description for rank in ranks],
            block_size=block_size,
            wake=wake,
        )
        self._policy = (
            RemotePrefillPolicy(config, step_cost, self._channel.quarantined) if config.role == "decode" else None
        )
        self.manager = HandoffManager(self._policy, self._channel.peer, fingerprint)
        self._notices: list[DispatchPrefill | CancelDispatch] = []
        self._closed = False

    def events(self) -> list[HandoffEvent]:
        """What the scheduler has to handle. Raises EngineUnavailable when this engine cannot go on."""
        return self._channel.events()

    def forward(self) -> None:
        """Do what the manager asks for."""
        channel = self._channel
        for action in self.manager.actions:
            match action:
                case Open(prefill_request, blocks):
                    channel.open(prefill_request, blocks)
                    self._notices.append(DispatchPrefill(prefill_request))
                case Cancel(handoff_id):
                    channel.cancel(handoff_id)
                    self._notices.append(CancelDispatch(handoff_id))
                case Forget(handoff_id):
                    self._notices.append(CancelDispatch(handoff_id))
                case Report(handoff_id, upto, blocks):
                    channel.progress(handoff_id, upto, blocks)
                case Finish(handoff_id, first):
                    channel.finish(handoff_id, first)
                case Refuse(prefill_request, reason):
                    channel.refuse(prefill_request, reason)
        self.manager.actions.clear()

    def notices(self) -> list[DispatchPrefill | CancelDispatch]:
        """For the control actor, since the last call."""
        notices, self._notices = self._notices, []
        return notices

    # -- commands ------------------------------------------------------------------------------------------

    def check(self, prefill_request: RemotePrefillRequest) -> None:
        """Raise RequestError if what is computed here would be of no use there."""
        if prefill_request.fingerprint != self.fingerprint:
            raise InvalidParameter(
                "fingerprint", prefill_request.fingerprint, f"that of this engine ({self.fingerprint})"
            )

    def accept(self, prefill_request: RemotePrefillRequest) -> None:
        self._channel.accept(prefill_request)

    def refuse(self, prefill_request: RemotePrefillRequest, reason: str) -> None:
        logger.warning("refused a prefill request handoff_id=%s reason=%s", prefill_request.handoff_id, reason)
        self._channel.refuse(prefill_request, reason)

    def remote_prefill_failed(self, handoff_id: str, reason: str, retry: bool) -> None:
        self._channel.remote_prefill_failed(handoff_id, reason, retry)

    def set_prefill_pool(self, replicas: list[PrefillReplica]) -> None:
        if self._policy is not None:
            self._policy.replicas = replicas

    # -- state ---------------------------------------------------------------------------------------------

    def stats(self) -> HandoffStats:
        return self._channel.stats()

    def live(self) -> list[HandoffInfo]:
        return self._channel.snapshot()

    def close(self) -> None:
        """More than once does no harm."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._worker.close()
