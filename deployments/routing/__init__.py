"""Choice of an engine for each request: a router per Serve handle, its policies, and its view of the engines."""
