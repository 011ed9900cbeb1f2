"""What was right in a trial is not tried again, unless something has changed that it depends on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.kernel_trial import check, record
from engine.kernel_trial.check import check_kernels
from engine.kernel_trial.trial import Verdict
from engine.model.config import ModelConfig
from engine.model.ops.gpu import norm
from tests.engine.model.ops.gpu.test_kernel_trial import MODELS

CONFIG = EngineConfig(model="a", device="cuda", allow_untested_kernels=True)


@pytest.fixture
def card(tmp_path, monkeypatch) -> dict[str, Any]:
    """What the record of a trial asks for: all of it may be changed."""
    facts: dict[str, Any] = {"name": "H100", "capability": (9, 0), "ptxas": (13, 1), "packages": ["torch-2.11"]}
    driver, sources = tmp_path / "version", tmp_path / "engine"
    driver.write_text("570.1")
    sources.mkdir()
    (sources / "kernel.py").write_text("1")
    monkeypatch.setattr(record, "DRIVER", driver)
    monkeypatch.setattr(record, "SOURCES", sources)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(record, "environment", lambda: f"{facts['name']}, ptxas {facts['ptxas']}")
    monkeypatch.setattr(record, "installed_packages", lambda: facts["packages"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: facts["capability"])
    monkeypatch.setattr(check, "has_kernels", lambda config, model: True)
    return facts | {"driver": driver, "kernel": sources / "kernel.py"}


@pytest.fixture
def trials(monkeypatch) -> list[list[Verdict]]:
    """What trials found out, the last one always anew."""
    found: list[list[Verdict]] = []

    def try_kernels(*args: Any) -> list[Verdict]:
        found.append([Verdict("norm.rms_norm", norm.rms_norm, calls=8)])
        return found[-1]

    monkeypatch.setattr(check, "try_kernels", try_kernels)
    return found


def start(config: EngineConfig = CONFIG, model: ModelConfig = MODELS["Qwen 3"]) -> None:
    check_kernels(config, model, Path("/nowhere"), lambda *args: None)


def test_a_second_start_tries_nothing_and_the_record_tells_what_was_found_out(card, trials, tmp_path):
    start()
    start()
    start(replace(CONFIG, model="the same from elsewhere", max_num_seqs=7))
    assert len(trials) == 1
    (file,) = (tmp_path / "triton" / record.FOLDER).iterdir()
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["driver"] == "570.1" and found["packages"] == ["torch-2.11"]
    assert found["verdicts"] == [
        {"op": "norm.rms_norm", "calls": 8, "graphs": 0, "error": 0.0, "wrong": ""},
    ]


@pytest.mark.parametrize("changed", ["driver", "kernel", "environment", "capability", "packages", "options", "model"])
def test_a_start_tries_again_where_something_has_changed(changed, card, trials, monkeypatch):
    start()
    config, model = CONFIG, MODELS["Qwen 3"]
    if changed in ("driver", "kernel"):
        card[changed].write_text("2")
    elif changed == "environment":
        monkeypatch.setattr(record, "environment", lambda: "H200, ptxas (13, 1)")
    elif changed == "capability":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    elif changed == "packages":
        monkeypatch.setattr(record, "installed_packages", lambda: ["flash-attn-2.8.3", "torch-2.11"])
    elif changed == "options":
        config = replace(CONFIG, block_size=16)
    else:
        model = replace(model, hidden_size=2 * model.hidden_size)
    start(config, model)
    assert len(trials) == 2
    start(config, model)
    assert len(trials) == 2


def test_a_wrong_kernel_is_tried_at_each_start(card, trials, monkeypatch):
    monkeypatch.setattr(check.dispatch, "refuse", lambda kernel: True)
    found = [Verdict("norm.rms_norm", norm.rms_norm, wrong="a row differs by 9.0%")]
    tried = []
    monkeypatch.setattr(check, "try_kernels", lambda *args: tried.append(args) or found)
    start()
    start()
    assert len(tried) == 2


def test_where_no_record_can_be_kept_each_start_tries_and_none_fails(card, trials, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(card["driver"]))  # a file, where there can be no folder
    start()
    start()
    assert len(trials) == 2
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    card["driver"].unlink()
    start()
    start()
    assert len(trials) == 4


def test_two_processes_name_a_record_alike():
    """Neither the order of a set nor an address may be part of it."""
    program = """
import torch
from pathlib import Path
from engine.config import EngineConfig
from engine.kernel_trial import check, record
from tests.engine.model.ops.gpu.test_kernel_trial import MODELS
record.DRIVER = Path(__file__) if "__file__" in globals() else Path("/etc/hostname")
torch.cuda.get_device_capability = lambda: (9, 0)
for model in MODELS.values():
    found = record.TrialRecord.of(check.trial_config(EngineConfig(device="cuda")), check.reduced(model))
    print(found.file.name)
"""
    names = [
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True, timeout=120,
        ).stdout.split()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert names[0] == names[1]
    assert len(set(names[0])) == len(MODELS)


def test_installed_packages_are_named_with_their_versions():
    assert f"torch-{torch.__version__}" in record.installed_packages()
