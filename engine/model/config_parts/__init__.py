"""Parallel layers, which model files are built from. Each takes a TPGroup and holds its rank's shards."""
