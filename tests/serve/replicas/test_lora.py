"""Streams of a model and of its adapters, mixed, while adapters come and go and a replica is killed."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
import openai
import pytest

from engine.lora.adapter_files import PIRATE
from tests.scrape import Scrape
from tests.serve.replicas.test_replay import processes
from tests.serve.serve_run import RANK, ServeRun

pytestmark = [pytest.mark.serve, pytest.mark.slow]

PROMPTS = [f"The {word} is" for word in ("ocean", "lamp", "winter", "dog")]


def adapter(folder: Path, alpha: float) -> Path:
    """The pirate's weights on another scale: the same shapes, and other texts."""
    shutil.copytree(PIRATE, folder)
    config = json.loads((PIRATE / "adapter_config.json").read_text()) | {"lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def stream(client: openai.OpenAI, model: str, prompt: str, running: Barrier | None = None) -> str:
    """running: met after the first event."""
    text = ""
    events = client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    for event in events:
        assert event.model == model
        text += event.choices[0].text
        if running is not None:
            running.wait(60)
            running = None
    return text


def load(server: ServeRun, name: str, folder: Path, **more: object) -> int:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=120).status_code


def test_adapters_come_and_go_and_a_replica_dies_and_no_text_changes(server, adapters_folder, tmp_path):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    first = adapter(tmp_path / "first", alpha=2)
    adapter(adapters_folder / "found", alpha=4)
    assert load(server, "loaded", first) == 200
    assert load(server, "loaded", first) == 400
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert {"pocket", "pirate", "loaded", "found"} <= cards.keys()
    assert (cards["loaded"]["root"], cards["loaded"]["parent"]) == (str(first), "pocket")

    others = {f"other {i}": adapter(tmp_path / f"other {i}", alpha=3 + i) for i in range(8)}
    asked = [(model, prompt) for prompt in PROMPTS for model in ("pocket", "pirate", "loaded", "found")]
    with ThreadPoolExecutor(len(asked) + len(others)) as pool:
        expected = list(pool.map(lambda one: stream(client, *one), asked))
        assert len(set(expected)) == len(asked)  # an adapter that has no effect would give the model's text
        running = Barrier(len(asked) + 1)
        streams = [pool.submit(stream, client, *one, running) for one in asked]
        victim, *_ = processes(server, RANK)
        running.wait(60)
        victim.kill()
        loads = [pool.submit(load, server, *other) for other in others.items()]  # some are sent to it
        gone = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "loaded"}, timeout=60)
        assert gone.status_code == 200, gone.text
        with pytest.raises(openai.NotFoundError):
            stream(client, "loaded", PROMPTS[0])
        assert [one.result(timeout=120) for one in streams] == expected
        assert [one.result(timeout=120) for one in loads] == [200] * len(others)

    assert load(server, "loaded", adapter(tmp_path / "second", alpha=1)) == 200
    assert stream(client, "loaded", PROMPTS[0]) != expected[2]  # other weights, and none of the old KV
    found = Scrape(httpx.get(f"{server.url}/metrics", timeout=60).text)
    assert found.sum("manta_adapter_requests_total", adapter="pirate") == 2 * len(PROMPTS)
    assert found.sum("manta_adapters_resident") > 0
