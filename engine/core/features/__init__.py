"""Features of the scheduler. Each is an object that the scheduler calls at a few points; an engine without the feature
uses an object with the same methods, which do nothing."""
