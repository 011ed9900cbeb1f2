"""Loads one rank's model."""

from __future__ import annotations

import logging
import time

import torch

from engine.model.loader import count_parameters, fill_with_noise, load_weights, pack_weights
from engine.model.models.llama import Model
from engine.model.models.registry import add_encoders, build_model
from engine.runner.rank_part import RankParts
from engine.runner.rank_setup import RankSetup

logger = logging.getLogger(__name__)


def load_model(setup: RankSetup, parts: RankParts) -> Model:
    """Return this rank's shard of the model, with its weights. Raises StartupError."""
    started = time.perf_counter()
    config, device = setup.config, setup.torch_device
    model = build_model(setup.model, setup.plan, setup.dtype, device)
    if setup.adapt is not None:
        setup.adapt(model)
    add_encoders(model, setup.dtype, device)
    if config.load_format == "dummy":
        fill_with_noise(model)
    else:
        load_weights(model, setup.folder, setup.tp)
    parameters = count_parameters(model)
    pack_weights(model)
    for extend in parts.extend:
        extend(model)
    logger.info(
        "model loaded architecture=%s parameters=%.1fM dtype=%s device=%s threads=%d seconds=%.1f",
        setup.model.architecture, parameters / 1e6, str(setup.dtype).removeprefix("torch."),
        device, torch.get_num_threads(), time.perf_counter() - started,
    )  # fmt: skip
    return model
