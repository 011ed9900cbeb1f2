"""What a snapshot of a scheduler has of handoffs."""

from __future__ import annotations

from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoff_requests import HandoffRequests
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.prompts_for_others import PromptsForOthers
from engine.parts.handoffs.remote_prefill_policy import RemotePrefillPolicy
from engine.parts.handoffs.remote_prompt import RemotePrompt
from engine.parts.handoffs.remote_prompts import RemotePrompts
from engine.parts.snapshot_kinds import SnapshotKinds
from engine.wire.handoff import BlocksAsked, HeldBlocks, PromptCost
from engine.wire.parts.handoffs import PrefillReplica

KINDS = SnapshotKinds(
    objects=(
        BlocksAsked,
        HandoffRequests,
        Handoffs,
        PromptsForOthers,
        RemotePrefillPolicy,
        RemotePrompt,
        RemotePrompts,
    ),
    messages=(HandoffConfig, PrefillReplica, PromptCost),
    rows=(HeldBlocks,),
    methods=((Handoffs, "compute_s"),),
)
