"""Options of a simulated cluster, and a search for the best ones."""
