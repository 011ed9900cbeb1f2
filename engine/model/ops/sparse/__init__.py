"""Attention to tokens that each row selects."""
