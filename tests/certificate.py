"""A certificate for localhost that nobody has signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    certfile: Path
    keyfile: Path

    @classmethod
    def make(cls, folder: Path) -> Certificate:
        made = cls(folder / "cert.pem", folder / "key.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-keyout", str(made.keyfile), "-out", str(made.certfile), "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return made
