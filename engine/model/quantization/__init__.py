"""Weights of few bits: how checkpoints store them, and what they mean (QuantizedWeight).

What multiplies them is in engine/model/ops/quantized_linear.py.
"""
