"""What outlives a request, and maybe its ingress: values by key, in memory, in a file, or in Redis."""
