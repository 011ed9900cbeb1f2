"""Write the reduced form of CustomResourceDefinitions beside this file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from tests.k8s.crds import FOLDER, reduced

for argument in sys.argv[1:]:
    for crd in yaml.safe_load_all(Path(argument).read_text()):
        text = json.dumps(reduced(crd), separators=(",", ":"), sort_keys=True)
        (FOLDER / f"{crd['metadata']['name']}.json").write_text(text + "\n")
