"""The checks of `manta doctor`, each on machines that it is told of."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from cluster.cli.check import gpu, model_fit
from cluster.cli.check.finding import Finding
from cluster.cli.check.machine import (
    cgroup_cores,
    check_cpu,
    check_flags,
    check_memory,
    check_open_files,
    check_port,
    check_shared_memory,
    cpu_flags,
)
from cluster.cli.check.model_fit import check_models, weight_bytes
from cluster.cli.check.packages import check_extra, check_needed, check_python, writable
from cluster.config import AppConfig
from engine.runner.kv_cache import GIB
from placement.capacity import Node
from tests.models import make_model


def levels(findings: list[Finding]) -> dict[str, str]:
    """The worst of each topic."""
    found: dict[str, str] = {}
    for finding in findings:
        found[finding.topic] = max(
            found.get(finding.topic, "ok"), finding.level, key=("ok", "warning", "problem").index
        )
    return found


def test_python_that_is_too_old_and_packages_that_are_missing_or_wrong_are_problems():
    assert check_python((3, 10, 2)).level == "problem"
    assert check_python((3, 11, 0)).level == "ok"
    assert check_needed([Requirement("torch>=1"), Requirement("ray")]).level == "ok"
    wrong = check_needed([Requirement("torch<1"), Requirement("no-such-package-at-all")])
    assert wrong.level == "problem"
    assert "torch is 2" in wrong.told and "no-such-package-at-all is not installed" in wrong.told


def test_extra_that_is_not_installed_is_no_warning_but_says_what_it_is_for():
    finding = check_extra("gpu", "FlashAttention on GPUs", [Requirement("no-such-package-at-all")])
    assert finding.level == "ok"
    assert finding.advice == "Only for FlashAttention on GPUs: pip install 'manta-serve[gpu]'"


def test_vectors_of_a_cpu_are_read_off_its_flags(tmp_path: Path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f amx_bf16\nprocessor : 1\nflags : fpu\n")
    finding = check_flags(cpu_flags(info))
    assert (finding.level, finding.told) == ("ok", "avx2, avx512f, amx_bf16")
    assert check_flags({"sse2"}).level == "warning"
    assert cpu_flags(tmp_path / "none") == set()


def test_container_that_gets_less_time_than_it_sees_cores_is_a_warning(tmp_path: Path, monkeypatch):
    limit = tmp_path / "cpu.max"
    limit.write_text("50000 100000\n")
    assert cgroup_cores(limit) == 0.5
    limit.write_text("max 100000\n")
    assert cgroup_cores(limit) is None
    assert cgroup_cores(tmp_path / "none") is None
    monkeypatch.setattr("cluster.cli.check.machine.cgroup_cores", lambda _: 0.5)
    assert levels(list(check_cpu()))["cores"] == "warning"


def test_little_memory_is_a_warning(tmp_path: Path, monkeypatch):
    assert check_memory(1.0, 16.0).level == "warning"
    assert check_memory(8.0, 16.0).level == "ok"
    assert check_shared_memory(tmp_path / "none").level == "warning"
    monkeypatch.setattr("cluster.cli.check.machine.LEAST_SHM_GIB", 2.0**40)
    assert "--shm-size" in check_shared_memory(tmp_path).advice


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
def test_few_open_files_are_a_warning_that_says_how_to_have_more(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 65536))
    finding = check_open_files()
    assert finding.level == "warning"
    assert "ulimit -n 65536" in finding.advice
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert check_open_files() == Finding("ok", "open files", "unlimited at a time")


def test_port_that_somebody_listens_on_is_a_problem():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert check_port("127.0.0.1", port, "the API", "Stop it").level == "problem"
    assert check_port("127.0.0.1", port, "the API", "Stop it").level == "ok"


def test_folder_that_cannot_be_written_to_is_known_by_trying(tmp_path: Path):
    assert writable(tmp_path)
    assert not writable(tmp_path / "none")
    assert not writable(Path("/proc"))


def test_gpu_that_torch_cannot_use_is_a_problem():
    assert gpu.without_torch([]).level == "ok"
    finding = gpu.without_torch(["NVIDIA L4, 550.54.15, 23034 MiB"])
    assert finding.level == "problem"
    assert "NVIDIA L4" in finding.told


# -- models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


def config(folder: Path, **section: Any) -> AppConfig:
    return AppConfig.parse({"models": [{"name": "tiny", "model": str(folder), **section}]})


def test_weights_are_counted_in_the_dtype_that_they_are_loaded_in(folder: Path):
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    float32 = weight_bytes(folder, torch.float32)
    assert float32 == 2 * weight_bytes(folder, torch.bfloat16)
    assert stored / 2 < float32 <= 2 * stored


def test_replica_that_fits_no_node_is_a_problem_and_one_that_fits_is_not(folder: Path):
    node = Node({"CPU": 2.0}, {})
    fits = list(check_models(config(folder), [node], here=False))
    assert set(levels(fits).values()) == {"ok"}
    large = list(check_models(config(folder, decode={"num_gpus": 1}), [node], here=False))
    assert levels(large)["decode of tiny"] == "problem"
    assert any("no node has 1 GPU" in finding.told for finding in large)


def test_replicas_that_fit_one_by_one_may_not_fit_together(folder: Path):
    node = Node({"CPU": 2.0}, {})
    found = levels(list(check_models(config(folder, decode={"num_replicas": 3}), [node], here=False)))
    assert found == {"decode of tiny": "ok", "all replicas": "problem"}
    growing = Node({"CPU": 2.0}, {"ray.io/node-group": "workers"})
    found = levels(list(check_models(config(folder, decode={"num_replicas": 3}), [growing], here=False)))
    assert found == {"decode of tiny": "ok", "all replicas": "warning"}


def told(config: AppConfig) -> list[str]:
    return [finding.told for finding in check_models(config, [Node({"CPU": 2.0}, {})], here=True)]


def test_kv_cache_is_what_a_rank_would_choose_at_its_start(folder: Path):
    found = told(config(folder, engine={"num_blocks": 50, "max_model_len": 100}))
    assert "KV cache for 800 tokens: 8.0 requests of max_model_len 100" in found


def test_model_or_cache_that_does_not_fit_into_memory_is_a_problem(folder: Path, monkeypatch):
    monkeypatch.setattr("engine.runner.kv_cache.free_host_bytes", lambda: 10 * GIB)
    assert any(
        "kv_cache_memory_gib=11.0 does not fit" in line
        for line in told(config(folder, engine={"kv_cache_memory_gib": 11}))
    )
    monkeypatch.setattr("engine.runner.kv_cache.free_host_bytes", lambda: 0)
    assert any("do not fit into memory" in line for line in told(config(folder)))


def test_dtype_that_the_cpu_has_no_instructions_for_is_a_warning(folder: Path, monkeypatch):
    monkeypatch.setattr(model_fit, "cpu_flags", lambda _: {"avx2"})
    for dtype, level in (("bfloat16", "warning"), ("float16", "warning"), ("float32", "ok")):
        found = list(check_models(config(folder, engine={"dtype": dtype}), [Node({"CPU": 2.0}, {})], here=True))
        assert levels(found)["decode of tiny"] == level
    monkeypatch.setattr(model_fit, "cpu_flags", lambda _: {"avx2", "avx512_bf16"})
    found = list(check_models(config(folder, engine={"dtype": "bfloat16"}), [Node({"CPU": 2.0}, {})], here=True))
    assert levels(found)["decode of tiny"] == "ok"
