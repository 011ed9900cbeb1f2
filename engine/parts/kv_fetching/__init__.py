"""KV that other engines have cached."""
