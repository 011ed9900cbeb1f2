"""Models that take images."""
