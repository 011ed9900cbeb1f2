from __future__ import annotations

import json

import pytest

from benchmarks import command, fallback
from engine.model.families.family import families
from tests.models import make_model
from tests.transformers_models import make_transformers_model

SMALL = ["--batch-sizes", "2", "--context-len", "20", "--steps", "2"]


def test_both_ways_decode_and_compute_prompts(tmp_path, capsys):
    before = dict(families())
    with pytest.raises(SystemExit) as ended:
        command.run(fallback.main, ["--model", str(make_model(tmp_path, "llama")), *SMALL, "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    (batch,) = report["batches"]
    assert report["steps"] == 2 and batch["batch_size"] == 2 and report["prompt"]["batch_size"] == 20
    for part in (batch, report["prompt"]):
        assert part["cost"] == pytest.approx(part["transformers_ms"] / part["native_ms"] - 1)
    assert before == families(), "the family is back in its table"


def test_a_model_without_native_code_cannot_be_compared(tmp_path, capsys):
    folder = make_transformers_model(tmp_path, "SmolLM3ForCausalLM")
    with pytest.raises(SystemExit) as ended:
        command.run(fallback.main, ["--model", str(folder), *SMALL])
    assert ended.value.code == 1 and "model must be of a native family" in capsys.readouterr().err
