"""Which steps of a rank run as graphs, and those of engines that share experts."""
