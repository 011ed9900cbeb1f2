"""One rank of a pipeline stage."""
