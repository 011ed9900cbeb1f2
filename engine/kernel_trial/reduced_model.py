"""A model with one layer of each kind, at the width of the whole model."""

from __future__ import annotations

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.kv_groups import KVCacheSpec


def reduced(model: ModelConfig) -> ModelConfig:
    """Return the model with its first layers only, as many as it takes to have every kind of layer."""
    specs = model.kv_specs
    kinds = [kind_of(model, layer, specs[layer]) for layer in range(model.num_layers)]
    count = next(n for n in range(1, model.num_layers + 1) if set(kinds[:n]) == set(kinds))
    return replace(
        model,
        num_layers=count,
        num_nextn_predict_layers=0,
        rope=model.rope[:count],
        window=model.window[:count],
        block_types=model.block_types[:count],
        layer_kv=model.layer_kv[:count],
        moe=None if model.moe is None else replace(
            model.moe, layers=model.moe.layers & set(range(count))
        ),
        recurrent=None if model.recurrent is None else replace(
            model.recurrent, layers=tuple(layer for layer in model.recurrent.layers if layer < count)
        ),
        vision=None,
        longest_span=0,
    )  # fmt: skip


def kind_of(model: ModelConfig, layer: int, spec: KVCacheSpec | int | None) -> tuple[object, ...]:
    """Return what tells a layer from others. spec: the layer's, as in LayerSpecs."""
    return (
        model.rope[layer], model.window[layer], model.block_types[layer : layer + 1],
        isinstance(spec, int) or spec, model.moe is not None and layer in model.moe.layers,
    )  # fmt: skip
