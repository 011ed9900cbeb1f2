"""`manta bench`: measurements, each with the figure that it has to be compared to."""
