"""The rank's end of each feature."""
