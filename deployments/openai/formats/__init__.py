"""Formats in which models write reasoning and tool calls: read from outputs, enforced by grammars, and detected."""
