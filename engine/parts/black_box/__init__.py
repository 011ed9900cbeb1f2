"""Notes of what an engine computes, for whoever finds it dead."""
