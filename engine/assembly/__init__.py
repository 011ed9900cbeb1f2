"""Puts an engine together: the model, the scheduler with its parts, and the step loop."""
