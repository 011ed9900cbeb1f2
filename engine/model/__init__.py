"""A model: its configuration, layers, weights, ops and quantized formats."""
