"""`manta check` and `manta doctor`: checks of a machine and a cluster before a start."""
