"""What low-rank adapters add to the product of a linear layer."""
