"""Chooses what counts and moves the experts of a rank."""

from __future__ import annotations

from torch import nn

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.distributed.tp_group import TPGroup
from engine.eplb.rank_experts import LAYER, NoExperts, RankExperts
from engine.eplb.shared_rank_experts import SharedRankExperts
from engine.model.expert_split import SpreadExperts, exchange_of
from engine.model.layers.moe import Experts


def open_experts(config: EngineConfig, model: nn.Module, tp: TPGroup, device: Device) -> NoExperts:
    """Return the experts of a rank. model: with this rank's layers, of which a pipeline stage may have none with
    experts. Every rank of a group has to call this. Raises StartupError."""
    ranks = tp.expert_ranks
    if not config.enable_expert_parallel or ranks.size == 1:
        return NoExperts()
    layers: dict[int, Experts] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Experts) and isinstance(layer.split, SpreadExperts):
            number = LAYER.search(f"{path}.")
            layers[int(number[1]) if number else len(layers)] = layer
    if exchange_of(tp) is not None:
        return SharedRankExperts(layers, ranks, device, config)
    return RankExperts(layers, tp, device, config.max_num_batched_tokens, config.eplb if config.enable_eplb else None)
