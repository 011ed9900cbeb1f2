"""The end of KV cache groups on a rank."""
