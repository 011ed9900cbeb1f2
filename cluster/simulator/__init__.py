"""The cluster as discrete events: its real schedulers, block pools, routers and autoscaler, and a cost of steps."""
