"""Features of an engine, a folder for each: the end at the scheduler, and a README that names the other ends."""
