"""The end of a Ray node that is to go, when nobody else ends it."""
