"""Makes the handoffs of an engine."""

from __future__ import annotations

from engine.kv_transfer.fingerprint import fingerprint
from engine.parts.canonical_bits import numerics_of
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.parts.handoffs.handoffs import Handoffs, compute_seconds
from engine.parts.handoffs.open_channel import open_channel
from engine.parts.handoffs.remote_prefill_policy import RemotePrefillPolicy
from engine.parts.setup import Made, PartSetup
from engine.wire.stats.handoff_stats import Role


def make(setup: PartSetup) -> Made:
    loaded, config = setup.loaded, setup.loaded.config.handoff
    if config is None:
        return Made()
    from engine.parts.handoffs.rank.kv_workers import KVWorkers  # it needs pyzmq

    runner, policy = loaded.runner, None
    channel = open_channel(setup, config, runner.parts[KVWorkers].of_ranks)
    if config.role == "decode":
        policy = RemotePrefillPolicy(config, setup.step_times.by_tokens)
    dtypes, ranks = (runner.dtype, runner.kv_dtype), runner.tp.size
    own = fingerprint(loaded.model, loaded.folder, *dtypes, runner.block_size, loaded.config.determinism, ranks)
    role: Role | None = "decode" if policy and config.switch_roles else None
    handoffs = Handoffs(policy, channel.peer, own, role, numerics_of(runner.setup, own))
    setup.compute_s = compute_seconds(setup.step_times, handoffs)
    return Made([handoffs], [HandoffCourier(channel, handoffs)])
