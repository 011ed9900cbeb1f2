"""Ops of layers whose past is a state instead of a KV cache."""
