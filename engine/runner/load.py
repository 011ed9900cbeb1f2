"""Loads one rank's model, its drafter, and the memory for received image embeddings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.distributed.tp_group import TPGroup
from engine.eplb.layer_slots import add_slots
from engine.errors import ConfigError
from engine.lora.adapter_loader import AdapterLoader
from engine.lora.model_adapters import ModelAdapters
from engine.model import fixed_order, fused_rows
from engine.model.expert_split import choose_exchange
from engine.model.layers.moe import Experts
from engine.model.loader import count_parameters, fill_with_noise, load_weights, pack_weights
from engine.model.models.image_encoder import encoder_config
from engine.model.models.llama import Model
from engine.model.models.registry import build, build_model
from engine.runner import kv_cache
from engine.runner.drafting import Drafting, NoDrafting
from engine.runner.rank_setup import RankSetup
from engine.spec_decode.open_drafter import open_drafter, target_layers
from engine.spec_decode.target import Target

logger = logging.getLogger(__name__)


def load_model(setup: RankSetup) -> Model:
    """Return this rank's shard of the model, with its weights. Raises StartupError."""
    started = time.perf_counter()
    config, device, plan = setup.config, setup.torch_device, setup.plan
    if plan.expert_exchange is not None:
        choose_exchange(config, plan.expert_exchange, on_gpu=device.type == "cuda")
    model = build_model(setup.model, plan, setup.dtype, device)
    if (
        config.enable_expert_parallel
        and setup.model.transformers
        and not any(isinstance(m, Experts) for m in model.modules())
    ):
        raise ConfigError(
            "enable_expert_parallel", True, f"left out for {setup.model.architecture}, which has no experts"
        )
    if plan.fixed_order:
        fixed_order.pad_layers(model)
    if (vision := setup.model.vision) is not None and setup.model.stage.is_first:
        from engine.model.transformers_backend.vision import VisionEncoder

        model.vision = build(lambda: VisionEncoder(vision), setup.dtype, device)
    if config.load_format == "dummy":
        fill_with_noise(model)
    else:
        load_weights(model, setup.folder, setup.tp)
    parameters = count_parameters(model)
    pack_weights(model)
    if config.redundant_experts is not None:
        add_slots(model)
    if not config.enable_lora:
        fused_rows.fuse(model)
    logger.info(
        "model loaded architecture=%s parameters=%.1fM dtype=%s device=%s threads=%d seconds=%.1f",
        setup.model.architecture, parameters / 1e6, str(setup.dtype).removeprefix("torch."),
        device, torch.get_num_threads(), time.perf_counter() - started,
    )  # fmt: skip
    return model


def load_adapters(setup: RankSetup, model: Model) -> AdapterLoader | None:
    """Give the model's linear layers slots for adapters, and return the loader that fills them; None without
    `enable_lora`."""
    config = setup.config
    if not config.enable_lora:
        return None
    adapters = ModelAdapters(
        model,
        config.lora_slots,
        config.max_lora_rank,
        config.max_num_batched_tokens,
        setup.torch_device,
        stage=setup.model.stage,
    )
    return AdapterLoader(adapters, config.max_cpu_loras or config.lora_slots, setup.device)


def compile_model(setup: RankSetup, model: Model, run_step: Callable[[int, int], None]) -> None:
    """Compile the model's layers with torch.compile. run_step: computes a step of (tokens, sequences)."""
    if setup.config.enforce_eager:
        logger.info("torch_compile has no effect, because enforce_eager is set")
        return
    from engine.model.torch_compile import compile_layers  # importing torch's compiler takes seconds

    compile_layers(model, setup.model, setup.tp, lambda tokens: run_step(tokens, 1))


def load_drafter(setup: RankSetup, model: Model) -> Drafting | NoDrafting:
    """Load the configured drafter with weights, if there is one. Only the first rank of the last stage has a drafter;
    other ranks get drafts with plans. Of the inputs of layers that it needs, each stage adds those of its own layers to
    its output."""
    stage = setup.model.stage
    if not stage.is_whole or setup.tp.rank == 0:
        model.aux_layers = tuple(i for i in target_layers(setup.config, setup.model) if i in stage.layers)
    if setup.tp.rank != 0 or not stage.is_last:
        return NoDrafting(setup.device)
    target = Target(
        model=model,
        config=setup.model,
        folder=setup.folder,
        tp=setup.tp,
        dtype=setup.dtype,
        device=setup.torch_device,
        block_size=setup.block_size,
        dummy=setup.config.load_format == "dummy",
    )
    drafter = open_drafter(setup.config, target)
    return NoDrafting(setup.device) if drafter is None else Drafting(setup, drafter)


def allocate_inbox(setup: RankSetup) -> Tensor | None:
    """Return memory for embeddings from encode engines, or None if this engine uses no encode engines. Each rank has
    room for as many embeddings as the encoder cache holds.

    Raises ConfigError for a model that reads text only.
    """
    if setup.config.encode is None:
        return None
    (group,) = encoder_config(setup.model).kv_groups
    num_blocks = -(-setup.config.encoder_cache_size // setup.block_size)
    return kv_cache.allocate(
        num_blocks, group, setup.block_size, dtype=setup.dtype, device=setup.torch_device, tp=TPGroup.single()
    )
