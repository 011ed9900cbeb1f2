"""Pocket: the demo model that ships with Manta, a tiny dictionary that answers in sentences.

`model/` is a Hugging Face folder (Qwen3 shape, 4.2 million parameters, ChatML) that loads as it is;
tools/pocket/ made it. Importing this package costs nothing and imports nothing else of the engine.
"""

from pathlib import Path

PATH = Path(__file__).parent / "model"
