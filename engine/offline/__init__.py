"""The offline API: `from engine import LLM`, an engine in the caller's process."""
