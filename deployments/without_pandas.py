"""Makes Ray Serve start without pandas, whose import takes half a second in each of a server's seven processes.

Where pandas is installed, Serve imports it to show data frames in its REST API; elsewhere, Serve does without. Ray
imports this module in each worker before the first task (cluster/ray_environment.py). All other code imports pandas as
before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

IMPORTER = "ray.serve._private.utils"


class PandasRefusal(MetaPathFinder):
    """Raises ModuleNotFoundError when pandas is imported while `IMPORTER` is being imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for pandas while `IMPORTER` is being imported; else return None, so that later
        finders look."""
        spec = getattr(sys.modules.get(IMPORTER), "__spec__", None)
        if fullname == "pandas" and getattr(spec, "_initializing", False):
            raise ModuleNotFoundError(f"{IMPORTER} does without pandas", name=fullname)
        return None


sys.meta_path.insert(0, PandasRefusal())
