"""Formats in which models write reasoning and tool calls: parsing, enforcement by grammars, and detection."""
