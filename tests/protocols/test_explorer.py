"""The handoff protocol in every order of what can happen."""

from __future__ import annotations

import pytest

from engine.kv_transfer.protocol.prefill_side import PrefillHandoff
from engine.kv_transfer.protocol.receive_state import ReceiveState
from tests.protocols.explorer import Explorer, Violation
from tests.protocols.faults import FAULTS, ROOT
from tests.protocols.process import Move, Process, Prompt, Scope
from tests.protocols.scopes import LARGE, QUICK, limits

MOST = 40_000  # states of a scope in `make test-all`


@pytest.mark.parametrize("name", QUICK)
def test_whatever_happens_to_a_handoff_it_ends_once_with_right_kv_and_all_blocks(name):
    assert Explorer(QUICK[name]).explore().is_whole


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_in_large_scopes_too(name):
    Explorer(LARGE[name]).explore(MOST)


def test_blocks_that_count_too_early_are_found_with_what_led_there(monkeypatch):
    ended = ReceiveState.ended
    monkeypatch.setattr(ReceiveState, "ended", lambda self, next_heartbeat: ended(self, 0))
    with pytest.raises(Violation, match=r"(?s)wrong KV counted as right.*d0 \('open', 0\).*d0 \('read', 0, "):
        Explorer(QUICK["a prompt"]).explore()


def test_a_lease_that_ends_twice_is_found(monkeypatch):
    close = PrefillHandoff.close

    def twice(self, *args):
        close(self, *args)
        close(self, *args)

    monkeypatch.setattr(PrefillHandoff, "close", twice)
    with pytest.raises(Violation, match="told twice"):
        Explorer(QUICK["a prompt"]).explore()


def test_an_engine_that_forgets_its_leases_is_found_when_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(PrefillHandoff, "tick", lambda self, now: None)
    with pytest.raises(Violation, match="a lease never ends"):
        Explorer(QUICK["a prompt"]).explore()


def test_a_protocol_that_does_not_bear_a_loss_is_found(monkeypatch):
    monkeypatch.setattr(PrefillHandoff, "due", property(lambda self: self.lease_until))  # it says nothing again
    with pytest.raises(Violation, match="does not bear lost messages"):
        Explorer(QUICK["a prompt"]).explore()


def test_what_is_left_out_as_another_order_leads_to_no_other_state(monkeypatch):
    scope = Scope(("d0", "d1", "p0"), (Move("p0", ("d0", "d1"), num_blocks=1),), limits(cancel=1))
    few = Explorer(scope).explore()
    monkeypatch.setattr(Explorer, "commutes", lambda self, one, other: False)
    many = Explorer(scope).explore()
    assert (few.states, few.local_states, few.messages) == (many.states, many.local_states, many.messages)
    assert few.asleep and few.transitions < many.transitions


def test_a_list_of_inputs_is_a_state():
    scope = QUICK["a prompt"]
    one, other = Process(scope, "d0"), Process(scope, "d0")
    assert one.digest() == other.digest()
    one.do("open", 0)
    assert one.digest() != other.digest()
    other.do("open", 0)
    assert one.digest() == other.digest()


def test_time_that_passes_before_and_after_is_no_difference_between_states():
    scope = Scope(("d0", "p0"), (Prompt("d0", ("p0",)),), limits(tick=9))
    early, late = Process(scope, "d0"), Process(scope, "d0")
    late.pass_time(50.0)
    early.do("open", 0)
    late.do("open", 0)
    assert early.digest() == late.digest()
    late.pass_time(0.5)
    assert early.digest() != late.digest()


def test_all_faults_can_be_planted():
    assert len({fault.says for fault in FAULTS}) == 10
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault.says
