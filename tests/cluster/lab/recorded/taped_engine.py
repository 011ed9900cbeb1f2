"""The tape of a real engine, in a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from engine.assembly.build import build_engine
from engine.clock import Clock
from engine.config import EngineConfig
from engine.parts.costs.cost_ledger import CostLedger
from engine.parts.tape.engine_tape import tape_with_key
from engine.parts.tape.file import pack_tapes
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.models import make_model

KEY = b"a key of a tape."
READING_S = 0.001  # on the engine's clock, from one reading to the next


def record(folder: Path, engine_id: str) -> Path:
    """Two requests with a common prefix, then more than fit at a time. Beside the tape is what the ledger says.

    The engine's clock goes on only when it is read, so that steps take the same time on any machine, however busy."""
    model = make_model(folder / "model", "llama")
    core = build_engine(
        EngineConfig(
            model=str(model), block_size=4, num_gpu_blocks_override=40, max_num_seqs=3, num_threads=1, tape_mib=16
        ),
        engine_id=engine_id,
        clock=Clock(monotonic=(READING_S * reading for reading in itertools.count()).__next__),
    )
    for i in range(8):
        params = SamplingParams(max_tokens=15, ignore_eos=True, temperature=0.0)
        core.add(GenerateRequest(request_id=f"r{i}", prompt=[*range(5, 14), 20 + i], params=params))
        core.step()
    while core.has_work:
        core.step()
    assert core.scheduler.totals.prefix_hit_tokens
    file = folder / f"{engine_id}.tape"
    file.write_bytes(pack_tapes([tape_with_key(core.journal.take(), KEY)]))
    file.with_suffix(".json").write_text(json.dumps(core.observers[CostLedger].seconds), encoding="utf-8")
    core.close()
    return file
