"""The one way into a scheduler, and who listens at it."""
