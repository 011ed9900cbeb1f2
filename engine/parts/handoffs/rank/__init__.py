"""What moves KV between ranks of several engines."""
