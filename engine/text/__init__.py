"""Text to token ids and back, and grammars that constrain an output."""
