"""Actions of the step loop on handoffs: `HandoffChannel.submit` takes one, `HandoffProtocol.apply` carries it out.

An action for a handoff that is over is ignored: its event is on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_transfer.protocol.messages import FirstToken
from engine.wire.messages import RemotePrefillFailed
from engine.wire.remote_prefill import RemotePrefillRequest

# -- decode ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """Expect the KV of a prompt, before the request for it is sent.

    Nobody else may touch the blocks until Received or Failed.
    """

    prefill_request: RemotePrefillRequest
    blocks: list[int]
    """Local blocks for the KV of the request's tokens from `skip` on."""


@dataclass(frozen=True, slots=True)
class CancelHandoff:
    """Give up a prompt that nobody wants any more.

    Failed follows once nothing is being read (reason `cancelled`, if it had not failed already), or Received, if that
    was on the way.
    """

    handoff_id: str


# -- prefill -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceptPrefill:
    """Take a prefill request, once.

    Closed follows, at the latest one lease after decode's last sign of life. If the prompt is still being computed
    then, nobody wants it any more.
    """

    prefill_request: RemotePrefillRequest


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """The KV of all tokens from `skip` up to `upto` is complete, and stays until Closed.

    Cumulative: later reports repeat the blocks of earlier ones.
    """

    handoff_id: str
    upto: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class FinishPrefill:
    """The whole prompt is computed, and ReportProgress has named all of its blocks."""

    handoff_id: str
    first: FirstToken


@dataclass(frozen=True, slots=True)
class RefusePrefill:
    """The prompt will not be computed. If it was accepted, Closed still follows, as decode may be reading."""

    prefill_request: RemotePrefillRequest
    reason: str


# -- both --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leave:
    """End all handoffs, since this engine is about to end."""


HandoffAction = (
    OpenHandoff
    | CancelHandoff
    | RemotePrefillFailed
    | AcceptPrefill
    | ReportProgress
    | FinishPrefill
    | RefusePrefill
    | Leave
)
