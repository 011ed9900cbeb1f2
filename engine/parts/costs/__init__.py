"""Charges requests with what they cost."""
