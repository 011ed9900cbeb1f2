"""The requests of a tape, simulated: as they were, and with other options."""
