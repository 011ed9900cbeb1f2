"""Devices on which models run."""
