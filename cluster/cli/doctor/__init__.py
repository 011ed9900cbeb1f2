"""`manta doctor`: what this machine and cluster can run, and what is missing."""
