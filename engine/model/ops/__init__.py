"""Ops, whose versions for CPU and GPU may differ. Each has one signature; its plain torch version is the oracle."""
