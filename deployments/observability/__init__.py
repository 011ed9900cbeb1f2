"""Metrics, traces and timelines of requests, and reports of ingresses and engines."""
