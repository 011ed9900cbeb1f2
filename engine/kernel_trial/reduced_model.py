"""A model with one layer of each kind, at the width of the whole model."""

from __future__ import annotations

from dataclasses import replace

from engine.model.config import ModelConfig


def reduced(model: ModelConfig) -> ModelConfig:
    """Return the model with its first layers only, as many as it takes to have every kind of layer."""
    kinds = [kind_of(model, layer) for layer in range(model.num_layers)]
    count = next(n for n in range(1, model.num_layers + 1) if set(kinds[:n]) == set(kinds))
    return replace(
        model,
        num_layers=count,
        num_nextn_predict_layers=0,
        rope=model.rope[:count],
        window=model.window[:count],
        block_types=model.block_types[:count],
        layer_kv=model.layer_kv[:count],
        moe=None if model.moe is None else replace(model.moe, layers=within(model.moe.layers, count)),
        recurrent=None if model.recurrent is None else replace(
            model.recurrent, layers=tuple(layer for layer in model.recurrent.layers if layer < count)
        ),
        vision=None,
    )  # fmt: skip


def kind_of(model: ModelConfig, layer: int) -> tuple[object, ...]:
    """Return what tells a layer from others."""
    spec = model.kv_specs[layer] if model.kv_specs else None
    return (
        model.rope[layer], model.window[layer], model.block_types[layer : layer + 1],
        isinstance(spec, int) or spec, model.moe is not None and layer in model.moe.layers,
    )  # fmt: skip


def within(layers: frozenset[int], count: int) -> frozenset[int]:
    return frozenset(layer for layer in layers if layer < count)
