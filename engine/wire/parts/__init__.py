"""Records of parts in messages."""
