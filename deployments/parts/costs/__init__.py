"""What engines spend."""
