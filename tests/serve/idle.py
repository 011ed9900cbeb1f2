"""Whether a server has nothing left to do."""

from __future__ import annotations

import httpx

from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun

QUEUES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "manta_ingress_requests_waiting")
HELD = ("running", "reserved", "leased")


def is_idle(server: ServeRun, headers: dict[str, str] | None = None) -> bool:
    """Whether nothing runs, waits or holds blocks any more."""
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        scrape = Scrape(http.get("/metrics").text)
        load: int = http.get("/load").json()["server_load"]
    held = sum(scrape.sum("manta_kv_blocks", state=state) for state in HELD)
    return held + sum(map(scrape.sum, QUEUES)) == load == 0
