"""Health, metrics, load, and the timelines of requests."""
