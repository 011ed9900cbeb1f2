"""Parallel layers: what a model file is built from. Each takes a TPGroup and holds its rank's shard."""
