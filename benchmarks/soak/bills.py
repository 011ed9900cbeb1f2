"""What a server bills for the same requests, and whether its books say the same."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import httpx

from benchmarks.soak.visitors import AS_FREE, BODIES, FREE, LIMIT_S, MODEL
from tests.scrape import Scrape

EXACT = ("prompt_tokens", "output_tokens")  # of the books
SHARE = 0.01  # by which seconds in the books may differ from those of the answers
BOOKED_S = 60.0  # until the books have all


@dataclass(frozen=True, slots=True)
class Bills:
    """Sums over one round of BODIES. answers: what their usage says. books: by how much the metrics of their key have
    grown. Each by `prompt_tokens`, `output_tokens` and `compute_seconds`."""

    answers: dict[str, float]
    books: dict[str, float]

    def problems(self, before: Bills) -> list[str]:
        """Return what differs between answers and books, and from an earlier round."""
        found = []
        for name, billed in self.answers.items():
            near = {} if name in EXACT else {"rel_tol": SHARE, "abs_tol": 0.001}
            if not math.isclose(billed, self.books[name], **({"rel_tol": 1e-9} | near)):
                found.append(f"{name}: {billed:g} are billed, and {self.books[name]:g} are in the books")
            if name in EXACT and billed != (earlier := before.answers[name]):
                found.append(f"{name}: {earlier:g} were billed for the same requests, at the end {billed:g}")
        return found


async def bills(url: str) -> Bills:
    """Send each body once, to a server without other requests. Raises httpx.HTTPError."""
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, headers=AS_FREE) as http:
        before, answers = await _books(http), {"prompt_tokens": 0.0, "output_tokens": 0.0, "compute_seconds": 0.0}
        for body in BODIES:
            asked = {**body, "model": MODEL, "usage": {"include": True}}
            usage = (await http.post("/v1/completions", json=asked)).raise_for_status().json()["usage"]
            answers["prompt_tokens"] += usage["prompt_tokens"]
            answers["output_tokens"] += usage["completion_tokens"]
            answers["compute_seconds"] += usage["cost_details"]["compute_seconds"]
        async with asyncio.timeout(BOOKED_S):
            while (after := await _books(http))["output_tokens"] - before["output_tokens"] < answers["output_tokens"]:
                await asyncio.sleep(1.0)
        return Bills(answers, {name: after[name] - before[name] for name in answers})


async def _books(http: httpx.AsyncClient) -> dict[str, float]:
    scrape = Scrape((await http.get("/metrics")).raise_for_status().text)
    names = {name: f"manta_key_{name}_total" for name in ("prompt_tokens", "output_tokens", "compute_seconds")}
    found = {name: scrape.select(metric, [("key", "=", FREE)]) for name, metric in names.items()}
    return {name: sum(one.value for one in series) for name, series in found.items()}  # 0 before the first request
