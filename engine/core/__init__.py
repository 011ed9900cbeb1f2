"""Step loop of one engine: scheduler, KV cache manager and block pool. Features are in engine/parts."""
