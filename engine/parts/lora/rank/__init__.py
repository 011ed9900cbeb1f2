"""Adapters on a rank."""
