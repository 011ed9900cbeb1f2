"""Requests whose parameters ban tokens, on a real engine."""

from __future__ import annotations


def test_a_request_whose_tokens_are_all_banned_fails_alone_and_the_engine_lives_on(engine):
    expected = engine.answer("good")
    engine.add("hopeless", allowed_token_ids=[2], min_tokens=3)
    engine.add("good too")
    engine.go()
    assert engine.last("hopeless").finish_reason == "error"
    assert engine.last("hopeless").error.code == "request_error"
    assert engine.last("hopeless").error.status == 400
    assert engine.tokens("hopeless") == []
    assert engine.tokens("good too") == expected
