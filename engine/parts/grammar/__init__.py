"""Grammars of structured outputs in the scheduler."""
