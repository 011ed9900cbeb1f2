"""Speculative decoding in the scheduler."""
