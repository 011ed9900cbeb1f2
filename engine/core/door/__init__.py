"""What stands between a scheduler and everything else: what enters and leaves it, who listens, and its parts."""
