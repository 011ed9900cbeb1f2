"""Commands, flags and engine arguments of vLLM: which there are here, and what is said to the others."""
