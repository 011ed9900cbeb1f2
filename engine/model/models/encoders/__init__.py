"""Models whose tokens see each other in both directions."""
