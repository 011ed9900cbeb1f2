"""Prompts that stay cached for a time because their clients asked for it."""
