"""One file per model family that differs in code; registry.py lists them all."""
