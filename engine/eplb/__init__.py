"""Expert parallel load balancing: experts move between ranks by their measured load, while the engine runs."""
