"""A batch outlives the ingress that works on it."""

from __future__ import annotations

import json

import openai
import pytest

from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]
NUM_LINES = 200


def request(i: int) -> str:
    body = {"model": "tiny", "prompt": f"line {i}", "max_tokens": 40, "ignore_eos": True}
    return json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})


def test_a_batch_goes_on_where_a_killed_ingress_has_left_it(tmp_path, model_folder):
    with ServeRun(tmp_path, {"models": [{"name": "tiny", "model": str(model_folder)}]}) as server:
        server.wait_until_healthy()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=5) as client:
            file = client.files.create(file="\n".join(map(request, range(NUM_LINES))).encode(), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 10)
            (ingress,) = [p for p in server.processes() if "ServeReplica:manta:ingress" in " ".join(p.cmdline())]
            ingress.kill()
            (output,) = (tmp_path / "batches" / "work" / batch.id).glob("output-*")
            answered = output.read_text()
            assert answered.count("\n") < NUM_LINES
            server.wait_for_line("batch begins")
            server.wait_for_line("batch ended", timeout_s=120)
            batch = client.batches.retrieve(batch.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
            text = client.files.content(batch.output_file_id).text
            assert text.startswith(answered[: answered.rfind("\n") + 1])
            ids = [json.loads(line)["custom_id"] for line in text.splitlines()]
            assert sorted(ids, key=int) == [str(i) for i in range(NUM_LINES)]
