"""`import manta`, in a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import manta
from cluster.app import build
from cluster.autoscaling.policy import Policy
from cluster.entry_point import BUILDER
from engine import LLM
from engine.offline.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]


def test_the_facade_has_the_very_objects_of_the_packages():
    assert (manta.LLM, manta.SamplingParams) == (LLM, SamplingParams)
    assert (manta.build, manta.AutoscalingPolicy) == (build, Policy)
    assert f"manta:{manta.build.__name__}" == BUILDER
    with pytest.raises(AttributeError, match="no attribute 'engines'"):
        _ = manta.engines
    assert all(getattr(manta, name) is not None for name in manta.__all__)


VLLM = (
    "LLM ModelRegistry PromptType TextPrompt TokensPrompt SamplingParams RequestOutput CompletionOutput PoolingOutput "
    "PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput "
    "ScoringOutput ScoringRequestOutput LLMEngine EngineArgs AsyncLLMEngine AsyncEngineArgs initialize_ray_cluster "
    "PoolingParams BeamSearchParams StructuredOutputsParams GuidedDecodingParams LoRARequest Logprob RequestOutputKind"
)


@pytest.mark.parametrize("name", VLLM.split())
def test_a_name_of_vllm_can_be_imported_or_is_refused_with_what_there_is(name):
    given: dict[str, object] = {}
    if name in manta.NOT_HERE:
        with pytest.raises(ImportError, match=rf"^manta has no {name}: "):
            exec(f"from manta import {name}", given)
    else:
        exec(f"from manta import {name}", given)
        assert given[name] is not None and name in manta.__all__


@pytest.mark.parametrize("file", ["engine.py", "deployments.py", "cluster/__init__.py"])
def test_whoever_imports_it_where_another_package_hides_ours_is_told_which(file, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "import manta"], env={**os.environ, "PYTHONPATH": path}, cwd=ROOT / "docs",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    name = file.partition("/")[0].removesuffix(".py")
    assert last.startswith(
        f"ImportError: {tmp_path / file} is imported as `{name}` instead of {ROOT / name}: rename it"
    )
