"""Runs schedulers over their tapes again."""
