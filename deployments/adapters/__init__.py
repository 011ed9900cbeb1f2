"""The LoRA adapters of a model, each served under its own name."""
