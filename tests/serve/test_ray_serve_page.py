"""The example of docs/ray_serve_llm.md: a file of Ray Serve LLM beside another application, which calls the model."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.serve.serve_run import MANTA_SERVE, free_port, kill_all, ray_environment, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ray_serve_llm.md").read_text()
pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]


def block(begin: str) -> str:
    """Return the code block of the page that begins so."""
    found = re.search(rf"```\w+\n({re.escape(begin)}.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_is_served(tmp_path):
    (tmp_path / "title.py").write_text(block("# title.py"))
    config = yaml.safe_load(block("applications:\n  - name: manta\n    route_prefix: /\n    import_path: manta:build"))
    config["http_options"] = {"host": "127.0.0.1", "port": (port := free_port())}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as ray_folder, (tmp_path / "log").open("w") as log:
        environment = ray_environment(ray_folder) | {"PYTHONPATH": paths}
        process = subprocess.Popen(
            [*MANTA_SERVE, "--address", "local", "serve.yaml"], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(f"{url}/title", process, tmp_path / "log"), 600)
            title = httpx.post(f"{url}/title", content="The sea is deep.", timeout=120)
            assert title.status_code == 200 and title.text.strip()
            body = {"model": "pocket", "prompt": "The sea is deep.\n\nTitle:", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
            assert answer["choices"][0]["text"] == title.text
        finally:
            kill_all([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return httpx.post(url, content="A title.", timeout=60).status_code == 200
    except httpx.TransportError:
        return False
