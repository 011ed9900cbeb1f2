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
from cluster.config import AppConfig
from engine.config import EngineConfig
from engine.errors import ServingError
from engine.offline.precompile import compile_all, needed
from engine.runner.rank_setup import read_model

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
        if not (folder / "config.json").is_file():
            print(f"{engine.model}: kernels are compiled at its start, as {folder} has no config.json", flush=True)
            continue
        if engine.determinism == "strict":
            print(f"{engine.model}: kernels are compiled at its start, as determinism is strict", flush=True)
            continue
        try:
            model = read_model(engine, folder)
        except ServingError as error:
            sys.exit(f"{folder}: {error}")
        for gpu in given.gpus:
            variants = needed(engine, model, GPUS[gpu])
            print(f"{engine.model}, {gpu}: {compile_all(variants, GPUS[gpu])} kernels", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
