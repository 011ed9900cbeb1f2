"""What requests, steps and blocks cost an engine."""
