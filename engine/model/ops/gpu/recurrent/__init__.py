"""Recurrent layers' ops in Triton."""
