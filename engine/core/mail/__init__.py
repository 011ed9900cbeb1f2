"""What carries messages between a scheduler and everything else in an engine."""
