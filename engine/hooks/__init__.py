"""Objects that have the same hooks, most of which most of them leave out."""
