"""Discrete-event simulation of a cluster, with its real schedulers, block pools, routers and autoscaler, and modelled
step times."""
