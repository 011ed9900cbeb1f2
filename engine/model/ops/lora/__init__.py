"""The low-rank products that adapters add to a linear layer's output."""
