"""Decides how many replicas each pool has (docs/autoscaling.md). Only policy.py knows Ray."""
