"""Pocket: the demo model that ships with Manta, a tiny dictionary that answers in sentences.

- `model/`: a Hugging Face folder (Qwen3 shape, 4.2 million parameters, ChatML) that loads as it is
- `words.py`, `dictionary.py`: WordNet files -> dictionary entries -> questions and answers
- `small_talk.py`, `conversations.py`: endless conversations made of them, the training text
- `train.py`, `evaluate.py`: how `model/` was made, and how much it knows

Importing this package costs nothing and imports nothing else of the engine: the model is a folder like any other.
"""

from pathlib import Path

PATH = Path(__file__).parent / "model"
