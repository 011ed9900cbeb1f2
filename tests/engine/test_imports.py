"""What `from engine import LLM` needs. A GPU machine may have torch and little else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OPTIONAL = (
    # the cluster's
    "ray", "fastapi", "starlette", "aiohttp", "pydantic", "prometheus_client", "uvicorn", "typer",
    # of kernels, several ranks, KV transfer, grammars
    "triton", "numba", "llvmlite", "flash_attn_interface", "flash_attn", "flashinfer", "zmq", "xxhash",
    "nixl", "llguidance", "psutil",
)  # fmt: skip
SCRIPT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {optional!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])

sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in {optional!r} else found(name, package)
importlib.util.find_spec = find_spec

from engine import LLM, SamplingParams
with LLM({model!r}, device="cpu", num_gpu_blocks_override=64, max_num_seqs=4, max_model_len=64, num_threads=1) as llm:
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
print("tokens", output.outputs[0].token_ids)
"""


def test_an_engine_runs_without_any_optional_package_and_says_so(tmp_path):
    from tests.models import make_model

    folder = make_model(tmp_path, "llama", tokenizer=True)
    script = SCRIPT.format(optional=set(OPTIONAL), model=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens [" in done.stdout
    assert "numba is not installed, so plain torch is used" in done.stderr
