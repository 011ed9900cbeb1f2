"""Makes what compares blocks on a rank, and decides whether an engine has it."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.parts.canonical_bits import why_not_canonical
from engine.parts.kv_check.rank.block_comparer import BlockComparer
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup

EVERY = 200  # computed tokens, unless the options say otherwise


def make(setup: RankSetup) -> RankPart | None:
    """Raises ConfigError if a check is asked for that cannot be."""
    every, why_not = setup.config.of(EngineConfig).kv_check_every, why_not_checked(setup)
    if every and why_not:
        raise ConfigError("kv_check_every", every, f"0 or left out: {why_not}")
    if every == 0 or why_not or not has_sources(setup):
        return None
    (group,) = setup.model.kv_groups
    return BlockComparer(group.layers)


def has_sources(setup: RankSetup) -> bool:
    """Return whether KV comes from elsewhere."""
    config = setup.config.of(EngineConfig)
    receives = config.handoff is not None and config.handoff.role in ("decode", "replica")
    return config.enable_prefix_caching and (config.offloads_kv or receives)


def why_not_checked(setup: RankSetup) -> str:
    """Return why no KV can be checked; empty if it can."""
    model = setup.whole
    one_kind = len(model.kv_groups) == 1 and model.kv_groups[0].spec.window is None and model.recurrent is None
    reasons = {
        "layers with a window or a state cannot go on from what is cached before a block": not one_kind,
        "all engines that share experts would have to compute a step for each check": (
            setup.config.of(EngineConfig).data_parallel_size > 1
        ),
    }
    return why_not_canonical(setup) or next((reason for reason, applies in reasons.items() if applies), "")
