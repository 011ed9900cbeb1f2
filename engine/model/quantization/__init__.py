"""Quantized weights: how checkpoints store them, and what they mean. ops/quantized_linear.py multiplies them."""
