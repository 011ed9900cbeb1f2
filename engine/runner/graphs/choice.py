"""Decides which steps of one rank run as graphs."""

from __future__ import annotations

import logging

from engine.config import EngineConfig
from engine.model.expert_split import exchange_of
from engine.model.ops import dispatch
from engine.model.ops.latent import tiles
from engine.runner.graphs.cuda_graphs import MAX_DECODE_SIZE, StepShape, decode_sizes, mixed_sizes
from engine.runner.rank_setup import RankSetup

logger = logging.getLogger(__name__)


def can_capture(setup: RankSetup) -> bool:
    """Return whether steps can run as graphs, and log why if not. Graphs need kernels that read nothing on the host."""
    config, model, asynchronous, why = setup.config.of(EngineConfig), setup.model, setup.device.asynchronous, None
    if config.enforce_eager:
        why = "enforce_eager"
    elif (exchange := exchange_of(setup.tp)) is not None and not (asynchronous and exchange.can_be_captured):
        why = "it takes the host to exchange tokens with other engines"
    elif not asynchronous and (config.torch_compile or model.transformers):
        why = "some of its kernels are not Manta's"
    elif not asynchronous and config.added_to_layers and (model.moe is not None or model.latent is not None):
        why = f"{' and '.join(config.added_to_layers)} of experts and of heads are added step by step"
    elif not asynchronous and model.gemma is not None:
        why = "its layers need more inputs than the output of the previous layer"
    elif asynchronous and model.recurrent is not None and not dispatch.gpu_kernels(setup.dtype, setup.torch_device):
        why = "the host looks up the states of its recurrent layers"
    elif asynchronous and model.latent is not None and not dispatch.gpu_kernels(setup.dtype, setup.torch_device):
        why = "latent attention is plain torch"
    elif model.latent is not None and model.latent.index is not None:
        why = "sparse attention selects tokens in plain torch"
    elif model.bidirectional:
        why = "this model does not generate"
    elif setup.torch_device.type == "cuda" and not dispatch.triton_found():
        why = "Triton's kernels are not available, so plain torch is used"
    if why:
        logger.info("steps run without graphs: %s", why)
    return why is None


def graph_shapes(setup: RankSetup) -> list[StepShape]:
    """Return the step shapes for which a GPU captures graphs."""
    model, config = setup.model, setup.config.of(EngineConfig)
    groups, seqs = model.kv_groups, config.max_num_seqs

    def tile_rows(longest: int) -> int:
        specs = (group.spec for group in groups)
        return min(tiles.tile_rows(longest, model.num_heads, s, setup.dtype, setup.torch_device) for s in specs)

    shapes = [StepShape(size, size, kv_groups=len(groups)) for size in decode_sizes(seqs)]
    if config.speculative_config:
        tokens = 1 + config.speculative_config.num_speculative_tokens  # of a sequence with drafts
        for size in decode_sizes(min(seqs, MAX_DECODE_SIZE // tokens, config.max_num_batched_tokens // tokens)):
            shapes.append(StepShape(size * tokens, size, tile_rows(tokens), len(groups), tokens))
    for size in mixed_sizes(config.max_num_batched_tokens):
        shapes.append(StepShape(size, min(size, seqs), tile_rows(size), len(groups)))
    return shapes
