"""The simulator against what it stands for.

python -m benchmarks.simulator [engine | cluster | larger | routing | split | scale]

engine: two real engines in this process.
cluster: a real cluster behind HTTP, of two replicas, and of one for prompts and one for answers.
larger: the same with a model of 25M parameters in place of the bundled one.
routing: SGLang's benchmark of its cache-aware router; published: 1.9 times the throughput of random routing.
split: the first figure of DistServe; published: 2.1 times the goodput per GPU, against whole prompts in one pool.
scale: 1,000 replicas, 1,000,000 requests.
"""

from __future__ import annotations

import sys

from benchmarks.simulator.cluster import cluster, larger
from benchmarks.simulator.engine import engine
from benchmarks.simulator.published import routing, scale, split

MEASUREMENTS = {
    "engine": engine,
    "cluster": cluster,
    "larger": larger,
    "routing": routing,
    "split": split,
    "scale": scale,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MEASUREMENTS:
        MEASUREMENTS[name]()
