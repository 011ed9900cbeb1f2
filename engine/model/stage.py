"""The part of a model that one pipeline stage holds.

A stage's model is the whole model without the parts of other stages. Layers of other stages return their inputs. The
first stage has the embedding (so has the last one if the head is tied to it), and the last has the last norm and the
head. So the code of a family is the same with and without stages. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.config_parts.stage import Stage

if TYPE_CHECKING:
    from engine.config import EngineConfig


def nth_stage(stage: int, layers: Sequence[int], config: ModelConfig) -> Stage:
    """Return a stage by its number. layers: number of layers of each stage."""
    first = sum(layers[:stage])
    return Stage(first, first + layers[stage], config.num_layers, config.head == "lm" and config.tie_word_embeddings)


def config_of(stage: Stage, config: ModelConfig) -> ModelConfig:
    """Return the configuration of a stage's model."""
    recurrent = config.recurrent
    if recurrent is not None:
        recurrent = replace(recurrent, layers=tuple(layer for layer in recurrent.layers if layer in stage.layers))
    return replace(
        config,
        stage=stage,
        recurrent=recurrent,
        head=config.head if stage.is_last else "none",
        mixins=(*config.mixins, "stage.StageModel"),
    )


def divide(costs: list[float], stages: int, last: float = 0.0) -> list[int]:
    """Return how many layers each of `stages` stages gets, at least one, so that the costliest stage costs least; among
    equally good divisions, the most even stages. costs: of each layer. last: cost of the last stage besides its
    layers."""
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[i]: (largest cost, sum of squares, layers of each stage) of the layers from i on, over the stages so far
    best = {i: (cost := sums[count] - sums[i] + last, cost * cost, [count - i]) for i in range(count)}
    for _ in range(stages - 1):
        found = {}
        for i in range(count):
            options = []
            for stop in range(i + 1, count):
                if stop in best:
                    (most, squares, rest), cost = best[stop], sums[stop] - sums[i]
                    options.append((max(most, cost), squares + cost * cost, [stop - i, *rest]))
            if options:
                found[i] = min(options)
        best = found
    return best[0][2]


def parse_layers(config: EngineConfig, num_layers: int) -> list[int] | None:
    """Return the configured number of layers of each stage; None if none is configured. Raises ConfigError."""
    text, stages = config.pipeline_layers, config.pipeline_parallel_size
    if text is None:
        if stages > num_layers:
            raise ConfigError("pipeline_parallel_size", stages, f"at most the model's number of layers ({num_layers})")
        return None
    counts = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(counts) != stages or len(text.split(",")) != stages or 0 in counts or sum(counts) != num_layers:
        limit = f"{stages} numbers of at least 1 whose sum is the model's number of layers ({num_layers})"
        raise ConfigError("pipeline_layers", text, limit)
    return counts


def check_stages(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for options and models that cannot be divided into stages yet."""
    parse_layers(config, model.num_layers)
    if config.pipeline_parallel_size == 1:
        return
    handoff = config.handoff
    carries = model.moe is not None and model.moe.zero_experts > 0  # from a layer's first half to its second
    needs_more = carries or model.gemma is not None or (model.latent is not None and model.latent.index is not None)
    for name, value, known in (
        ("torch_compile", True, not config.torch_compile),
        ("handoff", "encode", handoff is None or handoff.role != "encode"),
        ("encode", config.encode and config.encode.role, config.encode is None),
    ):
        if not known:
            limit = "left out, because pipeline_parallel_size above 1 does not support it yet"
            raise ConfigError(name, value, limit)
    if model.hidden_size % config.tensor_parallel_size:
        limit = f"a divisor of the model's hidden_size ({model.hidden_size}) with pipeline stages"
        raise ConfigError("tensor_parallel_size", config.tensor_parallel_size, limit)
    for part, present in (
        ("code of transformers", bool(model.transformers)),
        ("an encoder or bidirectional attention", model.bidirectional),
        ("layers that need more than the output of the layer before them", needs_more),
    ):
        if present:
            limit = f"1 for {model.architecture}: stages do not support {part} yet"
            raise ConfigError("pipeline_parallel_size", config.pipeline_parallel_size, limit)
