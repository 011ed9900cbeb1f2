"""The console's rates, in Node.js: `rates.js` needs no page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

import deployments.parts.console
from tests.engine_stats import engine_stats

RATES = Path(deployments.parts.console.__file__).parent / "page" / "rates.js"
SCRIPT = """
const rates = new Rates();
for (const state of %s) rates.add(state);
console.log(JSON.stringify([rates.of({ engine_id: "e" }).output, rates.history.get("m").length]));
"""


def state(at: float, tokens: int) -> dict:
    """A state of the cluster as the page gets it, with one replica."""
    replica = {"engine_id": "e", "stats": msgspec.to_builtins(engine_stats(generation_tokens=tokens))}
    return {"at": at, "models": [{"model": "m", "encode": [], "prefill": [], "decode": [replica]}]}


def test_a_state_that_is_seen_again_leaves_the_rates_as_they_are():
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    states = [state(10, 0), state(12, 200), state(12, 200), state(11.5, 150)]
    script = RATES.read_text() + SCRIPT % json.dumps(states)
    command = ["node", "--input-type=module"]
    said = subprocess.run(command, input=script, capture_output=True, check=True, text=True, timeout=60).stdout
    assert json.loads(said) == [100, 1]
