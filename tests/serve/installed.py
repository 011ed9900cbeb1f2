"""Manta as its users have it: a wheel in an environment of its own, beside files and a distribution of the same names.

The environment has the packages of the one that runs the tests, but neither its Manta nor this checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip"]
# a file where a folder would have to be is what not even root can write into
READ_ONLY = ("engine/model/ops/cpu/__pycache__",)


def build_wheel(tree: Path, folder: Path) -> Path:
    """Build the wheel of a source tree, into an empty folder."""
    command = [*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-q", "-w"]
    subprocess.run([*command, str(folder), str(tree)], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Installed:
    """A wheel, its environment, and the folder of a user whose files have the names of our packages."""

    def __init__(self, wheel: Path, folder: Path, *, writable: bool = False):
        """writable: compiled kernels can be kept beside their source; else neither there nor in the home."""
        self.environment_folder, self.user_folder = folder / "venv", folder / "user"
        venv.create(self.environment_folder)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(self.environment_folder)}))
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
        command = [*PIP, "--python", str(self.python), "install", "--no-deps", "--no-index", "-q"]
        subprocess.run([*command, str(wheel), str(wheel_of("cluster", folder))], check=True, timeout=300)
        for name in () if writable else READ_ONLY:
            (packages / "manta" / name).touch()
        (self.user_folder / "cluster").mkdir(parents=True)
        for name in ("engine.py", "deployments.py", "cluster/__init__.py"):
            (self.user_folder / name).write_text("WHOSE = 'the user'\n")
        (folder / "tmp").mkdir()
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        home = {} if writable else {"HOME": "/dev/null", "TMPDIR": str(folder / "tmp")}
        self.environment = own | home | {"PYTHONDONTWRITEBYTECODE": "1", "RAY_TMPDIR": str(folder / "tmp")}

    @property
    def python(self) -> Path:
        return self.environment_folder / "bin" / "python"

    @property
    def manta(self) -> Path:
        return self.environment_folder / "bin" / "manta"

    def run(self, *command: str | Path, timeout_s: float = 300.0) -> str:
        """Run a command in the user's folder and return what it prints."""
        done = subprocess.run(
            command, cwd=self.user_folder, env=self.environment, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


def wheel_of(name: str, folder: Path) -> Path:
    """Return the wheel of another distribution of this name and package, as PyPI has a `cluster` and a `manta`."""
    info, wheel = f"{name}-1.4.dist-info", folder / f"{name}-1.4-py3-none-any.whl"
    with ZipFile(wheel, "w") as files:
        files.writestr(f"{name}/__init__.py", "WHOSE = 'the other distribution'\n")
        files.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.4\n")
        files.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        files.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return wheel
