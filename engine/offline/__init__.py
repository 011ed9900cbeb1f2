"""Offline API: `from manta import LLM`, an engine in the caller's process."""
