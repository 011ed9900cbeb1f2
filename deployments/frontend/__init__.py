"""Turns engine requests into text: admission, sequences and their retries, and the channel on which tokens arrive."""
