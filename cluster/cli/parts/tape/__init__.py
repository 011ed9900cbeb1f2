"""Tapes: saving, replaying and simulating them."""
