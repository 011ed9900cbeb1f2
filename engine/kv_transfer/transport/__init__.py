"""KV workers of the ranks, and the transports that move blocks between ranks."""
