"""Tests with a model that people use, SmolLM2-135M-Instruct: `make test-real`, after `manta pull smollm2`."""
