"""What ingresses and engines make known: metrics, traces, timelines of requests, and reports to the autoscaler."""
