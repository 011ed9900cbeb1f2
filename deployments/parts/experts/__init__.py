"""Experts that are divided among ranks."""
