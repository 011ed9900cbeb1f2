"""Reads compiled kernels from a container image; keeps what the image lacks in Triton's own cache (TRITON_CACHE_DIR).

`python -m cluster.cli.precompile` fills the image's folder as the image is built. Triton finds a kernel by the hash of
its source, its arguments' types and constants, its options, the GPU, and Triton itself. So a kernel of the image that
does not match is never used: Triton compiles the kernel anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

FOLDER = Path(sys.prefix) / "kernels" / "triton"


class ImageCache(FileCacheManager):
    """The files of one kernel: those of the image if it has them, else those of Triton's cache."""

    folder = FOLDER

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files by their names; None if the kernel is in neither place.

        Paths of the image's files are made anew, as its folder may have moved since they were written."""
        own = self.folder / self.key
        try:
            names = json.loads((own / f"__grp__{filename}").read_text(encoding="utf-8"))["child_paths"]
        except (OSError, ValueError, KeyError):
            names = ()
        files = {name: own / name for name in names}
        if not files or not all(file.is_file() for file in files.values()):
            return super().get_group(filename)
        return {name: str(file) for name, file in files.items()}


def use_image(folder: Path = FOLDER) -> None:
    """Let Triton look into an image's folder first, if there is one."""
    if folder.is_dir():
        ImageCache.folder = folder
        knobs.cache.manager_class = ImageCache
