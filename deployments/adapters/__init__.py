"""A LoRA adapter as requests name it, and the configuration of a model's adapters."""
