"""Outputs that clients predict."""
