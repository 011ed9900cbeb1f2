"""Which engine gets a request: a router per Serve handle, its policies, and what it knows of the engines."""
