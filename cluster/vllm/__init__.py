"""Commands, flags and engine arguments of vLLM: their translation, and messages about unsupported ones."""
