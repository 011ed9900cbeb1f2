"""The LoRA adapters of a model, each of which is served under a name of its own."""
