"""`manta check` and `manta doctor`: what can be judged of a configuration, a machine and a cluster before a start."""
