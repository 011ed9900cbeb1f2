"""How CPU kernels are compiled and found again."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba import config

from engine.model.ops.cpu import kernel

ANSWER = """
from engine import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
with LLM("pocket", dtype="float32", num_threads=1, num_gpu_blocks_override=64) as llm:
    (output,) = llm.generate(["The quick brown fox jumps over the lazy dog, and then"], params, use_tqdm=False)
print([(token, chosen.logprob) for position in output.outputs[0].logprobs for token, chosen in position.items()])
"""


KERNELS = """
import numba
from engine.model.ops.cpu import kernel
print([numba.config.CACHE_DIR, kernel.keeps_code()])
"""


def where_code_is_kept(tmp_path: Path, **variables: str) -> tuple[str, bool]:
    """The folder that a process chooses whose source and home cannot be written, and whether it keeps code."""
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'code')!r}){KERNELS}"
    if not (tmp_path / "code").exists():
        source = Path(kernel.__file__).parents[4] / "engine"
        shutil.copytree(source, tmp_path / "code" / "engine", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "code/engine/model/ops/cpu/__pycache__").touch()  # a file, so that root cannot write there either
    environment = {"PATH": os.defpath, "HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    folder, keeps = ast.literal_eval(done.stdout)
    return folder, keeps


@pytest.mark.slow
def test_where_neither_source_nor_home_can_be_written_kernels_are_kept_in_a_private_folder(tmp_path):
    (tmp_path / "tmp").mkdir()
    folder = tmp_path / "tmp" / f"manta-{os.getuid()}"
    assert where_code_is_kept(tmp_path, TMPDIR=str(tmp_path / "tmp")) == (str(folder / kernel.SOURCES), True)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_folder_that_others_could_write_is_not_used_and_one_that_is_named_is(tmp_path):
    folder = tmp_path / "tmp" / f"manta-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert where_code_is_kept(tmp_path, TMPDIR=str(tmp_path / "tmp")) == ("", False)
    given = str(tmp_path / "given")
    assert where_code_is_kept(tmp_path, NUMBA_CACHE_DIR=given) == (str(Path(given, kernel.SOURCES)), True)


def test_kernels_are_kept_apart_for_each_state_of_all_sources(tmp_path):
    (tmp_path / "moe").mkdir()
    (tmp_path / "kernel.py").write_text("a = 1")
    (tmp_path / "moe" / "experts.py").write_text("b = 1")
    before = kernel.digest_of(tmp_path)
    (tmp_path / "moe" / "notes.txt").write_text("no source")
    assert kernel.digest_of(tmp_path) == before
    (tmp_path / "moe" / "experts.py").write_text("b = 2")
    assert kernel.digest_of(tmp_path) != before


@pytest.mark.slow
def test_a_process_that_compiles_the_kernels_gives_the_bits_of_one_that_finds_them_compiled(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ANSWER]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert first.count("(") == 24


def test_kernels_of_an_image_are_copied_to_where_numba_looks_and_replace_none(tmp_path, monkeypatch):
    image, cache = tmp_path / "image", tmp_path / "cache"
    (image / "cpu_1").mkdir(parents=True)
    (image / "cpu_1" / "norm.nbi").write_bytes(b"index")
    (image / "cpu_1" / "norm.nbc").write_bytes(b"code")
    kernel.bring_compiled(image)
    assert not cache.exists()
    monkeypatch.setattr(config, "CACHE_DIR", str(cache))
    (cache / "cpu_1").mkdir(parents=True)
    (cache / "cpu_1" / "norm.nbc").write_bytes(b"newer code")
    kernel.bring_compiled(image)
    assert {file.name: file.read_bytes() for file in (cache / "cpu_1").iterdir()} == {
        "norm.nbi": b"index",
        "norm.nbc": b"newer code",
    }
    kernel.bring_compiled(tmp_path / "absent")
