"""The check of KV on a rank."""
