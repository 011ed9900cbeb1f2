"""Pooling on a rank."""
