"""Key-value stores whose values outlive a request, and perhaps its ingress: in memory, in a file, or in Redis."""
