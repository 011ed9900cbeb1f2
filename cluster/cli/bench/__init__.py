"""`manta bench`: measures a server, or an engine alone."""
