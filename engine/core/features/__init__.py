"""Features of the scheduler. Each is an object with a few named methods where it has a say, and one of the same
methods that do nothing where an engine does without it."""
