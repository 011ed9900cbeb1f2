"""Tiers below the KV cache of a rank."""
