"""Prompts that other engines compute, and requests that move between engines."""
