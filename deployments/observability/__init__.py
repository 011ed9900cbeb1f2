"""Metrics, traces and timelines of requests, and what ingresses and engines report to the autoscaler."""
