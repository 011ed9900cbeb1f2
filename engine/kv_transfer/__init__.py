"""Handoffs: KV blocks computed by one engine (prefill) and used by another (decode)."""
