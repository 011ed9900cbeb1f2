"""Tiers below the KV cache: what they hold, what is copied to them, and the holds that are written there."""
