"""How many replicas each pool has (docs/autoscaling.md). Pure Python but for policy.py; the simulator runs it too."""
