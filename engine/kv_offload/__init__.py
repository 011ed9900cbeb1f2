"""Tiers below the KV cache: host memory, local disk and a shared store."""
