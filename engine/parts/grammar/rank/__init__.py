"""Grammars on a rank."""
