"""A model: its configuration, its layers, its weights, and the ops and quantized formats they are made of."""
