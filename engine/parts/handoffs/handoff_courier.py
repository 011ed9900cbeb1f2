"""Carries handoffs between this engine and others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.mail.courier import Engine, Server
from engine.errors import ServingError
from engine.parts.handoffs.channel_courier import ChannelCourier
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.inputs import (
    AddedRemote,
    HandoffWentOn,
    LinksRest,
    MovesAsked,
    ReplicasSet,
    RoleSet,
    StuckRefused,
)  # fmt: skip
from engine.wire.handoff import AcceptPrefill, RefusePrefill
from engine.wire.parts.handoffs import (
    CancelPrefill,
    MoveRequests,
    Prefill,
    PrefillReplicas,
    RemoteRequestFailed,
    SetRole,
)
from engine.wire.remote_request import RemoteRequest

if TYPE_CHECKING:  # it needs pyzmq
    from engine.kv_transfer.channel import HandoffChannel

logger = logging.getLogger(__name__)


class HandoffCourier(ChannelCourier):
    def __init__(self, channel: HandoffChannel, handoffs: Handoffs):
        super().__init__(channel, "engines", HandoffWentOn, LinksRest)
        self._handoffs = handoffs

    def take(self, command: msgspec.Struct, server: Server) -> bool:
        core = server.core
        match command:
            case Prefill(remote_request):
                server.make_way()
                server.admitted(remote_request.handoff_id)
                if not self.prefill(core, remote_request):
                    server.ended(remote_request.handoff_id)
            case CancelPrefill(handoff_id):
                server.abort(handoff_id)
            case RemoteRequestFailed():
                self.channel.submit(command)
            case PrefillReplicas(replicas):
                core.apply(ReplicasSet(replicas))
            case MoveRequests(count):
                core.apply(MovesAsked(count))
            case SetRole(role) if self._handoffs.role is not None:
                if role != self._handoffs.role:
                    core.apply(RoleSet(role))
                    server.report_soon()  # the control actors of other engines ask for the status
            case _:
                return False
        return True

    def status(self, core: Engine) -> dict[str, Any]:
        handoffs = self._handoffs
        if handoffs.role:  # else no other engine asks for prompts
            core.apply(StuckRefused())
        return super().status(core) | {
            "handoffs": self.channel.stats(),
            "fingerprint": handoffs.requests.fingerprint,
            "role": handoffs.role,
            "role_changes": handoffs.role_changes,
        }

    def prefill(self, core: Engine, asked_by: RemoteRequest) -> bool:
        """Compute a prompt for another engine. Returns False if it is refused. That engine is told either way."""
        if asked_by.handoff_id in core.scheduler.queue.live:
            return True  # the request came twice
        try:
            core.admit(AddedRemote(asked_by))
        except ServingError as error:
            logger.warning("refused a prefill request handoff_id=%s reason=%s", asked_by.handoff_id, error)
            self.channel.submit(RefusePrefill(asked_by, str(error)))
            return False
        self.channel.submit(AcceptPrefill(asked_by))
        return True
