"""How rows of mixture layers travel between engines that share experts."""
