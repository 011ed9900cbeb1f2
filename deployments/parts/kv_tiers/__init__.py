"""Tiers below the KV cache."""
