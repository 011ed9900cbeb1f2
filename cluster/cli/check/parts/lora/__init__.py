"""Checks of the LoRA adapters of a configuration."""
