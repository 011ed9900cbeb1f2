"""`manta bench`: load on a server, or on an engine alone."""
