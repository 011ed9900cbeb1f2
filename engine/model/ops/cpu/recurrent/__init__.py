"""The CPU kernels of recurrent layers."""
