"""Tiers below the KV cache: host memory and local disk."""
