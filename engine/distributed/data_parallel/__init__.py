"""Several engines that share the experts of one model."""
