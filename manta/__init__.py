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
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from engine.offline.prompts import PromptType, TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "AutoscalingPolicy",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LLMConfig",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProcessorConfig",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
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


NOT_HERE = dict.fromkeys(  # names of vLLM, with the alternative
    ("AsyncEngineArgs", "EngineArgs"), "pass the arguments to LLM or to `manta serve`"
) | {
    "AsyncLLMEngine": "use LLM, or `manta serve`",
    "BeamSearchParams": "use SamplingParams(n=N), and choose by cumulative_logprob",
    "GuidedDecodingParams": "use StructuredOutputsParams",
    "LLMEngine": "use LLM, or `manta serve`",
    "ModelRegistry": "docs/models.md lists the models; CONTRIBUTING.md says how to add one",
    "RequestOutputKind": "a result is returned when it is complete",
    "initialize_ray_cluster": "use ray.init, or `manta serve --address`",
}


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
    """Import what takes seconds to load when it is used. Raises ImportError for a name of vLLM that is not here."""
    if name in NOT_HERE:
        raise ImportError(f"manta has no {name}: {NOT_HERE[name]}")
    if name == "LLM":
        from engine.offline.llm import LLM

        return LLM
    if name == "Logprob" or name.endswith("Output"):
        from engine.offline import outputs

        if hasattr(outputs, name):
            return getattr(outputs, name)
    if name in ("PromptType", "TextPrompt", "TokensPrompt"):
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
