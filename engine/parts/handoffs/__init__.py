"""Handoffs: prompts that other engines compute for this one, prompts computed for them, and requests that move."""
