"""Replicas: the control actor of one engine, and pools of replicas as their callers see them."""
