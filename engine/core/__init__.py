"""Step loop of one engine: scheduler, KV cache manager, block pool, handoffs, and the server around them."""
