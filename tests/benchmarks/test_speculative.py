from __future__ import annotations

import random

from benchmarks.speculative import Bench, Load
from engine.config import EngineConfig
from engine.options.speculation import SpeculativeConfig
from tests.fake_drafter import draft_always
from tests.models import make_model


def test_given_texts_take_the_place_of_what_the_model_writes(tmp_path, monkeypatch):
    draft_always(monkeypatch)
    prompt = random.Random(0).sample(range(3, 97), 30)
    config = EngineConfig(
        model=str(make_model(tmp_path, "llama")), num_threads=1, num_gpu_blocks_override=64, max_model_len=128
    )
    bench = Bench(config, SpeculativeConfig(method="ngram", num_speculative_tokens=4))
    try:
        report = bench.measure(Load("copy", [prompt], [prompt[:27]]), repetitions=1)
    finally:
        bench.close()
    assert report.output_tokens == 27
    assert report.drafted == report.accepted > 15, "a copy of the prompt is looked up in it"
