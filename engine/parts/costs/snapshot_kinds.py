"""What a snapshot of a scheduler has of accounts."""

from __future__ import annotations

from engine.costs.request_cost import COSTS, BlockAccount, KVCost, RequestCost
from engine.parts.costs.cost_accounts import CostAccounts
from engine.parts.snapshot_kinds import SnapshotKinds

KINDS = SnapshotKinds(
    objects=(BlockAccount, CostAccounts, KVCost, RequestCost),
    constants={"BlockAccount": BlockAccount},
    unsaid=(COSTS,),
)
