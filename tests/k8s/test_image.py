"""The image has what its pods load or run only once they have a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "k8s" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
LAST_STAGE = DOCKERFILE.rpartition("\nFROM ")[2]


def packages(variant: str) -> set[str]:
    """Debian packages of the last stage, as its shell would put them together."""
    (choice,) = re.findall(r"case \"\$VARIANT\" in .*? esac(?= \\\n    && apt-get install)", LAST_STAGE)
    (always,) = re.findall(r"apt-get install -y --no-install-recommends ([^\\\n]*)\$more", LAST_STAGE)
    more = subprocess.run(["sh", "-c", f"VARIANT={variant}; {choice}; echo $more"], capture_output=True, text=True)
    return {*always.split(), *more.stdout.split()}


def test_every_image_has_what_the_probes_of_kuberay_run():
    for variant in ("cpu", "gpu"):
        assert {"wget", "libgomp1"} <= packages(variant)


def test_gpu_image_has_the_compiler_of_triton_and_the_library_with_which_nccl_finds_rdma():
    assert {"gcc", "libc6-dev", "libibverbs1", "ibverbs-providers"} <= packages("gpu")
    assert not {"gcc", "libibverbs1"} & packages("cpu")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_build_of_a_gpu_image_ends_if_nothing_can_be_compiled_in_it(tmp_path):
    (probe,) = re.findall(r"printf '#include <Python\.h>.*?probe\.so(?= \\\n)", LAST_STAGE, re.DOTALL)
    script = probe.replace("/tmp/probe.so", str(tmp_path / "probe.so"))
    assert subprocess.run(["sh", "-c", script], check=False).returncode == 0
    (tmp_path / "gcc").symlink_to("/bin/false")
    broken = f"PATH={tmp_path}:$PATH; {script}"
    assert subprocess.run(["sh", "-c", broken], check=False).returncode != 0


def test_image_without_gpus_is_built_without_nixl():
    (choice,) = re.findall(r"case \"\$VARIANT\" in [^\n]* extras=otel ;; esac", DOCKERFILE)
    for variant, extras in {"cpu": "otel", "gpu": "nixl,otel"}.items():
        made = subprocess.run(
            ["sh", "-c", f"VARIANT={variant}; {choice}; echo $extras"], capture_output=True, text=True
        )
        assert made.stdout.strip() == extras
