"""Low-rank adapters on a CPU."""
