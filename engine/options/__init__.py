"""Options of features."""
