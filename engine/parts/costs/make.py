"""Makes the accounts of an engine."""

from __future__ import annotations

from engine.costs.block_usage import observe_usage
from engine.parts.costs.cost_accounts import CostAccounts
from engine.parts.costs.cost_ledger import CostLedger
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    setup.usages += observe_usage(setup.kv_cache)
    setup.get("kv_tiers")  # its tiers are accounted for too
    now = setup.clock.monotonic()
    ledger = CostLedger(setup.step_times, setup.usages, setup.loaded.block_bytes, now, setup.tier_usages)
    return Made([CostAccounts()], observers=[ledger])
