"""The public API of Manta: `from manta import LLM, SamplingParams`, and `import_path: manta:build` for Ray Serve.

In an installed wheel all other packages lie below this one, as `manta.engine` and so on, where nothing can hide them.
In a checkout they lie next to it (docs/install.md).
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.app import build, build_openai_app, build_pd_openai_app
    from cluster.autoscaling.policy import Policy as AutoscalingPolicy
    from cluster.ray_data import ProcessorConfig, build_processor
    from cluster.ray_serve_llm import LLMConfig
    from deployments.http.middleware import around_serve
    from engine.offline.llm import LLM
    from engine.offline.outputs import (
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from engine.offline.prompts import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "AutoscalingPolicy",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LLMConfig",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProcessorConfig",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "around_serve",
    "build",
    "build_openai_app",
    "build_pd_openai_app",
    "build_processor",
]


def _find_neighbours(folder: Path) -> None:
    """Raise ImportError if another package hides one of ours next to this one. folder: of this package."""
    for name in ("engine", "placement", "deployments", "cluster"):
        if (folder / name).is_dir():  # an installed wheel
            continue
        spec, ours = find_spec(name), folder.parent / name
        places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
        if str(ours) not in places:
            found = places[-1] or places[0] if places else "nothing"
            raise ImportError(
                f"{found} is imported as `{name}` instead of {ours}: rename it, start in another folder, or install "
                "Manta's wheel, which has no such names"
            )


_find_neighbours(Path(__file__).resolve().parent)

from engine import LoRARequest, PoolingParams, StructuredOutputsParams  # noqa: E402
from engine.offline.sampling_params import SamplingParams  # noqa: E402


def __getattr__(name: str) -> Any:
    """Import what takes seconds to load when it is used."""
    if name == "LLM":
        from engine.offline.llm import LLM

        return LLM
    if name == "Logprob" or name.endswith("Output"):
        from engine.offline import outputs

        if hasattr(outputs, name):
            return getattr(outputs, name)
    if name in ("TextPrompt", "TokensPrompt"):
        from engine.offline import prompts

        return getattr(prompts, name)
    if name in ("build", "build_openai_app", "build_pd_openai_app"):
        from cluster import app

        return getattr(app, name)
    if name == "LLMConfig":
        from cluster.ray_serve_llm import LLMConfig

        return LLMConfig
    if name == "AutoscalingPolicy":
        from cluster.autoscaling.policy import Policy

        return Policy
    if name == "around_serve":  # Ray Serve gets this name, the same in a checkout and in a wheel
        from deployments.http.middleware import around_serve

        return around_serve
    if name in ("ProcessorConfig", "build_processor"):
        from cluster import ray_data

        return getattr(ray_data, name)
    if name == "__version__":
        return version("manta-serve")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
