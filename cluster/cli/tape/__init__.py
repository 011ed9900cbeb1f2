"""`manta tape` and `manta replay`: what the schedulers of a cluster have decided, and what they would have decided."""
