"""Runs step plans on one rank: inputs, model, sampling, CUDA graphs and the KV cache's tensor."""
