"""Which parts an engine has."""
