"""Collectives of ranks on one machine, over memory that they share."""
