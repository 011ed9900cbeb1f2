"""Adapters that requests load and unload."""
