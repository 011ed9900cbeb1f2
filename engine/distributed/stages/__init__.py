"""Pipeline stages: their groups of ranks, and the results of their steps."""
