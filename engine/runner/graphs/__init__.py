"""What computes the steps of a rank as graphs, on a GPU and on a CPU; and what a GPU needs besides."""
