"""Prompts that stay cached for a time."""
