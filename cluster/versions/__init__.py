"""What two versions of Manta that meet in one cluster can read of each other."""
