"""Replicas: the control actor of one engine, and the pools of replicas as their callers see them."""
