"""Images: from a file of unknown origin to what a vision encoder takes, and to the tokens that stand for it."""
