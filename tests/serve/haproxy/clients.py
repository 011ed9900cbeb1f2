"""Who may ask the server of this folder, and how much it takes."""

from __future__ import annotations

KEYS = {"alice": "sk-alice", "bob": "sk-bob"}
ALICE, BOB = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
MAX_NUM_SEQS, MAX_WAITING = 8, 8  # of the model `tiny`
FITS = MAX_NUM_SEQS + MAX_NUM_SEQS // 8 + MAX_WAITING
