"""Parallel layers, which model files are built from. Each takes a ShardPlan and holds its rank's shards."""
