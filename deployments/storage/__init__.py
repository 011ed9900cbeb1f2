"""Values that outlive a request, and perhaps its ingress, by key, in memory, in a file, or in Redis."""
