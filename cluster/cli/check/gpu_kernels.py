"""Tries the kernels of a model on this machine's GPU, for `manta gpu-check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.assembly.load import read_model
from engine.assembly.open_runner import load_runner
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.kernel_trial.check import has_kernels, try_kernels
from engine.model.checkpoint.overlay import engine_folder

if TYPE_CHECKING:
    from engine.kernel_trial.trial import Verdict


def tried(model: str, options: dict[str, Any]) -> list[Verdict]:
    """Return the verdict on each kernel of a model. options: of EngineConfig. Raises StartupError if no kernel of ours
    would be used: without a GPU, without Triton, or for a model that transformers computes."""
    config = EngineConfig(model=model, **{**options, "load_format": "dummy", "allow_untested_kernels": True})
    folder = engine_folder(config)
    config, found = read_model(config, folder)
    if not has_kernels(config, found):
        why = f"{found.architecture} has none" if torch.cuda.is_available() else "torch finds no GPU here"
        raise StartupError(f"there are no kernels to try: {why}")
    return try_kernels(config, found, folder, load_runner)
