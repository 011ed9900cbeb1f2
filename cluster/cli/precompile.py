"""Compiles the Triton kernels that the models of Serve configurations need, where there is no GPU:

    python -m cluster.cli.precompile serve_config.yaml --models FOLDER --gpus sm_90 sm_100

FOLDER has a folder for each model, by the last part of its name in the Serve configuration; only its config.json is
read. Kernels go to Triton's cache (TRITON_CACHE_DIR). k8s/docker/Dockerfile does this as it builds an image.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.cli.check.serve_config import load, ours
from cluster.config.app_config import AppConfig
from engine.config import EngineConfig
from engine.errors import ServingError
from engine.offline.precompile import compile_all, needed
from engine.runner.rank_setup import read_model

NOT_COMPUTED = (ServingError, RuntimeError, ValueError, TypeError, AttributeError)
"""Raised for a folder without configuration, or a layer that needs values. The image is built nevertheless."""
GPUS = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0)}


def engines_on_gpus(path: Path) -> Iterator[EngineConfig]:
    """Yield the configurations of engines on GPUs in a Serve configuration."""
    for _, application in ours(load(path)):
        for model in AppConfig.of(application).models:
            for role in model.pools:
                if role != "encode" and model.on_gpu(role):
                    yield model.engine_config(role)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster.cli.precompile", description=__doc__)
    parser.add_argument("serve_config", nargs="+", type=Path)
    parser.add_argument("--models", required=True, type=Path, help="folder of folders with a config.json")
    parser.add_argument("--gpus", required=True, nargs="+", choices=GPUS)
    given = parser.parse_args(arguments)
    for engine in (engine for path in given.serve_config for engine in engines_on_gpus(path)):
        folder = given.models / Path(engine.model).name
        try:
            if engine.determinism == "strict":
                raise ValueError("determinism is strict")
            model = read_model(engine, folder)
            variants = {gpu: needed(engine, model, GPUS[gpu]) for gpu in given.gpus}
        except NOT_COMPUTED as error:
            print(f"{engine.model}: its kernels are compiled at its start: {error}", flush=True)
            continue
        for gpu, found in variants.items():
            print(f"{engine.model}, {gpu}: {compile_all(found, GPUS[gpu])} kernels", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
