"""What only a real model shows: `python -m benchmarks.real_model`."""
