"""KV from another engine is checked: what is right stays, what is wrong is found, and its engine is left alone."""

from __future__ import annotations

import pytest

from engine.parts.kv_check.messages import KVCheckStats
from engine.wire.parts.kv_fetching import FetchStats
from tests.engine.kv_transfer.pair import Engine, Pair
from tests.engine.kv_transfer.test_fetching import LENGTH, Caches
from tests.engine.kv_transfer.test_fetching import make_config as fetching_config
from tests.engine.kv_transfer.test_moves import prompt
from tests.engine.kv_transfer.test_pair import make_config
from tests.models import make_model


def checks(engine: Engine) -> dict[str, dict[str, int]]:
    stats = engine.server._core.stats().record(KVCheckStats)
    assert stats is not None
    return stats.checks


def flip_bits(engine: Engine) -> None:
    """Flip the sign of all numbers in an idle engine's cache."""
    (cache,) = engine.server._core.ranks.runner.kv_caches
    cache.neg_()


def quarantined(engine: Engine) -> list[str]:
    return engine.status.handoffs.quarantined if engine.status and engine.status.handoffs else []


@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kv_that_is_fetched(tmp_path, ranks, caplog, flips, size):
    config = fetching_config(make_model(tmp_path, "llama"), tensor_parallel_size=size)
    with Caches(config, config, ranks) as caches:
        caches.ask(caches.there, prompt(LENGTH))
        caches.settle()
        if flips:
            flip_bits(caches.there)
        turn = prompt(LENGTH) + caches.answers[0][0] + [5, 6, 7]
        assert caches.ask(caches.here, turn, holder=caches.there) > 0
        caches.wait_for(lambda: checks(caches.here) == {"fetch": {"equal": not flips, "different": flips}})
        caches.settle()
        if not flips:
            if size == 1:  # the engine with which the answers are compared has one rank
                caches.check(fetching_config(config.model, fetching=False))
            return
        assert "source=fetch name=prefill layer=0 " in caplog.text, "the other engine's name"
        caches.wait_for(lambda: quarantined(caches.here) == ["prefill"])
        assert caches.ask(caches.here, turn, holder=caches.there) == 0, "neither from there nor from the cache"
        assert caches.here.server._core.stats().record(FetchStats).fetches == {"received": 1}


@pytest.mark.parametrize("flips", [False, True])
def test_kv_that_is_handed_over(ranks, caplog, flips):
    with Pair(make_config("decode", kv_check_every=1), make_config("prefill"), ranks) as pair:
        pair.ingress.add("first", prompt(LENGTH))
        answer = pair.ingress.tokens("first")
        pair.wait_for(lambda: checks(pair.decode) == {"handoff": {"equal": 1, "different": 0}})
        pair.settle()
        pair.decode.forget()
        if flips:
            flip_bits(pair.prefill)
        pair.ingress.add("again", prompt(LENGTH))
        again = pair.ingress.tokens("again")
        pair.wait_for(lambda: checks(pair.decode) == {"handoff": {"equal": 1 + (not flips), "different": flips}})
        pair.settle()
        if not flips:
            assert again == answer
            return
        assert "source=handoff name=prefill layer=0 " in caplog.text
        pair.wait_for(lambda: quarantined(pair.decode) == ["prefill"])
        pair.ingress.add("last", prompt(LENGTH))
        assert pair.ingress.tokens("last") == answer
