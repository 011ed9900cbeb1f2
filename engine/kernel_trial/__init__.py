"""Tries our own kernels on a GPU before the model is loaded, with the shapes of the model's own layers."""
