"""Changes to logits before sampling that have kernels: masks of grammars, and penalties."""
