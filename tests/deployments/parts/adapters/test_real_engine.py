"""Adapters that cannot be served, over HTTP and with a real engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.model_info import model_info
from deployments.http.middleware import AuthConfig
from engine.lora.adapter_files import PIRATE
from engine.pocket import PATH
from tests.adapter_folders import write_adapter
from tests.deployments.real_api import RealApi, real_api

WEIGHTS = "adapter_model.safetensors"
ASKED = {"prompt": "The ocean is", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(PIRATE, folder))


async def status_of(api: RealApi, route: str, **body: object) -> int:
    return (await api.client.post(f"/v1/{route}", json=body)).status_code


def test_what_cannot_be_served_has_its_status_and_a_stream_goes_on_whatever_happens_to_its_adapter(tmp_path):
    found = tmp_path / "found"
    for folder in (tmp_path / "outside", tmp_path / "cut", tmp_path / "without weights", found / "sql"):
        copied(folder)
    weights = tmp_path / "cut" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-5])
    (tmp_path / "without weights" / WEIGHTS).unlink()
    (found / "link").symlink_to(tmp_path / "outside")
    refused = {
        write_adapter(tmp_path / "high rank", rank=32): 400,
        write_adapter(tmp_path / "of another model"): 400,
        tmp_path / "cut": 400,
        tmp_path / "without weights": 404,
        tmp_path / "nowhere": 404,
    }
    section = ModelSection(
        name="pocket", model="pocket", lora_modules={"pirate": "pocket-pirate"}, lora={"dynamic_folder": str(found)}
    )

    async def scenario() -> None:
        info = model_info(section, IngressSection())
        async with real_api(PATH, info=info, auth=AuthConfig(allow_runtime_lora_updating=True)) as api:
            expected = (await api.complete(**ASKED, model="pirate"))["choices"][0]["text"]
            body = {**ASKED, "model": "pirate", "stream": True}
            async with api.client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                events = [await anext(lines)]
                for path, status in refused.items():
                    asked = {"lora_name": "new", "lora_path": str(path)}
                    assert await status_of(api, "load_lora_adapter", **asked) == status, path
                asked = {"lora_name": "pirate", "lora_path": str(PIRATE)}
                assert await status_of(api, "load_lora_adapter", **asked) == 400
                assert await status_of(api, "unload_lora_adapter", lora_name="pirate") == 200
                for name in ("pirate", "new", "nobody", "../outside", str(tmp_path / "outside"), "link"):
                    assert await status_of(api, "completions", **{**ASKED, "model": name}) == 404, name
                events += [line async for line in lines]
            texts = [json.loads(event[6:])["choices"] for event in events if event.startswith("data: {")]
            assert "".join(choice["text"] for choices in texts for choice in choices) == expected
            assert (await api.complete(**ASKED, model="sql"))["choices"][0]["text"] == expected
            listed = (await api.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["pocket", "sql"]

    asyncio.run(asyncio.wait_for(scenario(), 100))
