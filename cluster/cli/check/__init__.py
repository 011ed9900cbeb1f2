"""`manta check` and `manta doctor`: checks of a configuration, a machine and a cluster before a start."""
