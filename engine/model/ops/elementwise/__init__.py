"""Ops on single values or rows that only some families have."""
