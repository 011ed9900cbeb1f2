"""The parameters of xIELU, the activation of Apertus, which are in the metadata of a GGUF file."""

from __future__ import annotations

from engine.model.checkpoint.gguf.entry import Entry
from engine.model.checkpoint.gguf.keys import GGUFError, num_layers
from engine.model.checkpoint.gguf.source import GGUFSource

PARAMETERS: dict[str, tuple[int, ...]] = {"alpha_n": (1,), "alpha_p": (1,), "beta": (), "eps": ()}
"""With their shapes."""


def parameters(source: GGUFSource) -> dict[str, Entry]:
    """Return the parameters of each layer by their names in a checkpoint. Raises GGUFError."""
    found: dict[str, Entry] = {}
    count = num_layers(source.metadata)
    for name, shape in PARAMETERS.items():
        values = source.metadata.get(f"xielu.{name}")
        values = values if isinstance(values, list) else [values] * count
        if len(values) != count or not all(isinstance(value, int | float) for value in values):
            raise GGUFError(f"xielu.{name} = {str(values)[:100]} is not supported: must be {count} numbers")
        for layer, value in enumerate(values):
            one = Entry(file="", offset=0, shape=shape, type="F32", numbers=(float(value),))
            found[f"model.layers.{layer}.mlp.act_fn.{name}"] = one
    return found
