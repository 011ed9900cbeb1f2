"""The handoff protocol: both sides of a handoff, without clock, socket or thread."""
