"""Images: turns files of unknown origin into inputs of a vision encoder and placeholder tokens of a prompt."""
