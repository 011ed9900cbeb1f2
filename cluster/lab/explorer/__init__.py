"""`manta replay`: a tape's decisions made again and compared, and its moments shown."""
