"""Remembers, beside Triton's cache, that the kernels of a model were right on a kind of card, so that later starts need
not try them again."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.kernel_trial.environment import environment
from engine.model.config import ModelConfig
from engine.user_folder import write_private

if TYPE_CHECKING:
    from engine.kernel_trial.trial import Verdict

logger = logging.getLogger(__name__)

DRIVER = Path("/proc/driver/nvidia/version")
SOURCES = Path(__file__).parents[1]  # of the engine
FOLDER = "manta_trials"  # of Triton's cache


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A file that exists if all kernels were right in a trial on which the same things had an influence."""

    file: Path
    facts: dict[str, Any]
    """What had an influence, as JSON."""

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> TrialRecord | None:
        """Return the record of a trial. config, model: those of the trial. Returns None, so that each start tries its
        kernels, if there is no driver's version."""
        from triton import knobs

        try:
            driver = DRIVER.read_text(encoding="utf-8")
        except OSError:
            return None
        facts = {
            "environment": f"{environment()}, compute capability {torch.cuda.get_device_capability()}",
            "driver": driver,
            "packages": installed_packages(),
            "sources": digest_of_sources(),
            "options": repr(replace(config, model="")),
            "model": repr(model),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return cls(Path(knobs.cache.dir) / FOLDER / f"{digest}.json", facts)

    def exists(self) -> bool:
        return self.file.is_file()

    def write(self, verdicts: list[Verdict]) -> None:
        """Write what was found out. Logs an error, since an engine starts without a record as well."""
        content = json.dumps({**self.facts, "verdicts": [verdict.facts() for verdict in verdicts]}, indent=1)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_private(self.file, content.encode())  # at once, since other ranks may write it, too
        except OSError as error:
            logger.info("the trial of kernels is not remembered: %s", error)


def installed_packages() -> list[str]:
    """Return the names of all installed packages with their versions, as their folders of metadata have them."""
    folders = {Path(entry or ".") for entry in sys.path}
    return sorted(path.stem for folder in folders for path in folder.glob("*.dist-info"))


def digest_of_sources() -> str:
    """Return a digest of all sources of the engine: of kernels, layers and steps."""
    digest, root = hashlib.sha256(), SOURCES
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
