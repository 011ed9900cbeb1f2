"""Kernels that an image brings along are compiled by nobody again. See cluster/cli/precompile.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
import yaml
from triton import knobs

from engine.model.ops.gpu.kernel_cache.image_cache import ImageCache, use_image

pytestmark = pytest.mark.kernels

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "head_dim": 64,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SERVED = {
    "name": "tiny", "model": "/models/tiny", "decode": {"num_gpus": 1},
    "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 128},
}  # fmt: skip
GROUP = "__grp__kernel.json"


def write_kernel(folder: Path, key: str, text: str, *, at: Path | None = None) -> None:
    """Write files as Triton keeps those of a kernel. at: where the list of files says that they are."""
    own = folder / key
    own.mkdir(parents=True)
    (own / "kernel.cubin").write_text(text)
    listed = {"kernel.cubin": str((at or folder) / key / "kernel.cubin")}
    (own / GROUP).write_text(json.dumps({"child_paths": listed}))


@pytest.fixture
def caches(tmp_path, monkeypatch) -> Iterator[tuple[Path, Path]]:
    """The folders of an image, and of a pod."""
    image, pod = tmp_path / "image", tmp_path / "pod"
    monkeypatch.setattr(ImageCache, "folder", image)
    with knobs.cache.scope():
        knobs.cache.dir = str(pod)
        yield image, pod


def cubin(key: str) -> str | None:
    group = ImageCache(key).get_group("kernel.json")
    return None if group is None else Path(group["kernel.cubin"]).read_text()


def test_a_kernel_is_read_from_the_image_wherever_its_folder_is_now_else_from_the_pods_cache(caches, tmp_path):
    image, pod = caches
    write_kernel(image, "A", "of the image", at=tmp_path / "where it was built")
    write_kernel(pod, "B", "of the pod")
    assert (cubin("A"), cubin("B"), cubin("C")) == ("of the image", "of the pod", None)


@pytest.mark.parametrize("broken", ["list", "file"])
def test_a_kernel_whose_files_are_not_all_in_the_image_is_one_that_it_lacks(caches, broken):
    image, pod = caches
    write_kernel(image, "A", "of the image")
    write_kernel(pod, "A", "of the pod")
    if broken == "list":
        (image / "A" / GROUP).write_text("{")
    else:
        (image / "A" / "kernel.cubin").unlink()
    assert cubin("A") == "of the pod"


def test_triton_keeps_its_own_cache_where_no_image_has_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageCache, "folder", tmp_path)
    with knobs.cache.scope():
        use_image(tmp_path / "kernels")
        assert knobs.cache.manager_class is None
        use_image(tmp_path)
        assert knobs.cache.manager_class is ImageCache


def logging_ptxas(folder: Path) -> tuple[Path, Path]:
    """Return Triton's compiler as a program that notes how it was called, and its notes."""
    program, notes = folder / "ptxas", folder / "calls"
    real = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    program.write_text(f'#!/bin/sh\necho "$@" >> {notes}\nexec {real} "$@"\n')
    program.chmod(0o755)
    return program, notes


RANDOM_STEPS = """
import random, sys
from pathlib import Path
from cluster.cli.precompile import engines_on_gpus
from engine.model.ops.gpu.kernel_cache.image_cache import use_image
from engine.model.ops.gpu.kernel_cache.target import variants
from engine.model.config import ModelConfig
from engine.offline.precompile import Step, compute
from engine.offline.weightless_model import WeightlessModel
use_image(Path(sys.argv[1]))
(engine,) = engines_on_gpus(Path(sys.argv[2]))
model, chance = WeightlessModel(ModelConfig.from_folder(Path(sys.argv[3])), block_size=64), random.Random(0)
with variants(90) as found:
    for _ in range(20):
        seqs = chance.randint(1, 2)
        tokens = chance.choice((seqs, chance.randint(seqs, 128)))
        compute(model, Step(tokens, seqs, chance.randint(-(-tokens // seqs), 512)))
for variant in found.values():
    variant.compile(90)
print(len(found))
"""


@pytest.mark.slow
def test_a_pod_with_the_kernels_of_its_image_never_calls_the_compiler(tmp_path):
    models, config, moved = tmp_path / "models", tmp_path / "serve_config.yaml", tmp_path / "moved"
    (models / "tiny").mkdir(parents=True)
    (models / "tiny" / "config.json").write_text(json.dumps(TINY))
    application = {"name": "manta", "import_path": "manta:build", "args": {"models": [SERVED]}}
    config.write_text(yaml.safe_dump({"applications": [application]}))
    program, notes = logging_ptxas(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}

    def run(*command: str, cache: Path) -> str:
        own = {"TRITON_CACHE_DIR": str(cache), "TRITON_PTXAS_PATH": str(program), "TRITON_STORE_BINARY_ONLY": "1"}
        done = subprocess.run(
            [sys.executable, *command], env={**environment, **own}, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    arguments = [str(config), "--models", str(models), "--gpus", "sm_90"]
    out = run("-m", "cluster.cli.precompile", *arguments, cache=tmp_path / "image")
    count = int(out.split()[-2])
    assert out == f"/models/tiny, sm_90: {count} kernels\n" and count > 5
    assert "-lineinfo" in notes.read_text() or "--gpu-name" in notes.read_text(), "the compiler was called"
    (tmp_path / "image").rename(moved)
    notes.unlink()
    found = int(run("-c", RANDOM_STEPS, str(moved), str(config), str(models / "tiny"), cache=tmp_path / "pod"))
    assert 5 < found <= count
    assert set(notes.read_text().split("\n")) == {"--version", ""}
    assert not list((tmp_path / "pod").rglob("*.cubin"))
