"""The console: a page that shows the cluster and talks to its models."""
