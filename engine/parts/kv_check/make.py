"""Makes the check of KV that comes from elsewhere."""

from __future__ import annotations

import logging

from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.kv_check.kv_check import KVCheck
from engine.parts.kv_check.kv_check_courier import HiddenChecks, KVCheckCourier
from engine.parts.kv_check.rank.block_comparer import BlockComparer
from engine.parts.kv_check.rank.make import EVERY, has_sources, why_not_checked
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.parts.setup import Made, PartSetup

logger = logging.getLogger(__name__)


def make(setup: PartSetup) -> Made:
    runner, config = setup.loaded.runner, setup.loaded.config
    if not has_sources(runner.setup):
        return Made()
    if (comparer := runner.parts.get(BlockComparer)) is None:
        why = why_not_checked(runner.setup) or "kv_check_every is 0"
        logger.info("KV from tiers and other engines is not checked: %s", why)
        return Made()
    every = config.kv_check_every or EVERY
    logger.info("KV from tiers and other engines is checked with at most one in %d computed tokens", every)
    check = KVCheck(every, config.max_num_batched_tokens, setup.part("lora", AdapterSlots))
    check.listen_to(
        setup.part("kv_tiers", KVOffloading),
        setup.part("kv_fetching", KVFetching),
        setup.part("handoffs", Handoffs),
    )
    courier = KVCheckCourier(check, comparer, setup.group.size, setup.broadcaster)
    return Made([check], [courier], [HiddenChecks()])
