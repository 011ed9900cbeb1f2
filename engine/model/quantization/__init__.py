"""Quantized weights: how checkpoints store them and how they are decoded. ops/quantized_linear.py multiplies them."""
