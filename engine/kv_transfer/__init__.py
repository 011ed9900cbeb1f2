"""Handoffs: one engine (prefill) computes KV blocks that another (decode) uses."""
