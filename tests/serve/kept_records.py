"""What clients leave with one version of a server and ask the next one for: answers under a key, responses, batches,
files, holds, and keys of which the budget is used up."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.serve.chaos_cluster import MODEL
from tests.serve.serve_run import wait_until
from tests.serve.version_cluster import AS_OPERATOR, BUDGET

LINES = 20
HELD = "The ocean is deep and blue, and the lamp is lit in winter. " * 20


@dataclass(frozen=True)
class Kept:
    """Left with one version. name: unique. spent: a key of which the budget is used up."""

    name: str
    answer: dict[str, Any]
    response: dict[str, Any]
    batch: str
    spent: str


class Records:
    def __init__(self, url: str):
        self._url = url
        self._client = httpx.Client(base_url=url, headers=AS_OPERATOR, timeout=120)

    def leave(self, name: str) -> Kept:
        """Leave one of each. The batch has only begun."""
        answer = self._keyed(name)
        asked = {"model": MODEL, "input": f"What is {name}?", "max_output_tokens": 8}
        response = self._post("/v1/responses", asked)
        (hold,) = self._post("/v1/completions", self._held(name) | {"hold_s": 3600})["usage"]["holds"]
        assert hold["status"] == "held", hold
        return Kept(name, answer, response, self._begin_batch(name), self._spend(name))

    def check(self, kept: Kept, *, held: bool = True) -> None:
        """All that was left is there, as it was; a batch ends with each of its lines answered once. held: whether the
        hold must be, too. A replica that is killed takes its own with it."""
        assert self._keyed(kept.name) == kept.answer
        assert self._get(f"/v1/responses/{kept.response['id']}") == kept.response
        further = {"input": "And then?", "previous_response_id": kept.response["id"], "max_output_tokens": 4}
        assert self._post("/v1/responses", {"model": MODEL, **further})["status"] in ("completed", "incomplete")
        usage = self._post("/v1/completions", self._held(kept.name))["usage"]
        assert not held or usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 64, usage
        self._check_batch(kept.batch)
        assert self._is_spent(kept.spent)

    def _keyed(self, name: str) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": f"The {name} is", "max_tokens": 24, "temperature": 1.0}
        return self._post("/v1/completions", body, {"Idempotency-Key": f"key-{name}"})

    def _held(self, name: str) -> dict[str, Any]:
        return {"model": MODEL, "prompt": f"{name}: {HELD}", "max_tokens": 2, "cache_salt": name}

    def _spend(self, name: str) -> str:
        budget = {"budget_duration": BUDGET, "max_engine_seconds": 1e-6}
        key: str = self._post("/key/generate", {"key_alias": name, "budget_limits": [budget]})["key"]
        wait_until(lambda: self._is_spent(key), 60)
        return key

    def _is_spent(self, key: str) -> bool:
        body = {"model": MODEL, "prompt": "And?", "max_tokens": 2}
        answer = self._client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return answer.status_code == 429

    def _begin_batch(self, name: str) -> str:
        body = {"model": MODEL, "prompt": f"{name} is", "max_tokens": 40, "ignore_eos": True}
        lines = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
            for i in range(LINES)
        ]
        files = {"file": (f"{name}.jsonl", "\n".join(lines).encode())}
        answer = self._client.post("/v1/files", data={"purpose": "batch"}, files=files)
        assert answer.status_code == 200, answer.text
        window = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch: str = self._post("/v1/batches", {"input_file_id": answer.json()["id"], **window})["id"]
        return batch

    def _check_batch(self, batch: str) -> None:
        wait_until(lambda: self._get(f"/v1/batches/{batch}")["status"] == "completed", 120)
        found = self._get(f"/v1/batches/{batch}")
        answers = self._client.get(f"/v1/files/{found['output_file_id']}/content").text.splitlines()
        assert sorted(int(json.loads(line)["custom_id"]) for line in answers) == list(range(LINES))

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        answer = self._client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def _get(self, path: str) -> dict[str, Any]:
        answer = self._client.get(path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found
