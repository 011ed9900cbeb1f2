"""Trains Medusa heads, which draft for a model, on that model's own answers."""
