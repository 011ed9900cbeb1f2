"""`manta bench`: load on a server, and an engine alone."""
