"""The protocol between a decode and a prefill engine; what is received or verified is compared by the world itself."""

import msgspec
import pytest

from engine.kv_transfer.protocol.decode_side import READ_LIMIT
from engine.kv_transfer.protocol.messages import (
    Cancel,
    DropSource,
    Envelope,
    Heartbeat,
    Progress,
    Read,
    Refused,
    Release,
    Released,
)
from engine.kv_transfer.protocol.receive_state import MAX_READ_TOKENS
from engine.wire.handoff import Closed, Failed, FirstToken, Received
from tests.engine.kv_transfer.handoff_world import BLOCK, CONFIG, World

PROMPT = list(range(1, 31))  # 7 blocks and a half


def started(prompt=PROMPT, skip=0, computed=0, read=True, **world):
    """A handoff that prefill has accepted, and decode knows it. computed: tokens of the prompt, which decode reads."""
    w = World(**world)
    remote_request = w.decode.open(prompt, skip)
    w.prefill.accept(remote_request)
    w.settle()
    if computed:
        w.prefill.compute(remote_request.handoff_id, computed)
        w.settle(reads=read)
    return w, remote_request.handoff_id


def all_free(w):
    return all(len(engine.free) == engine.num_blocks for engine in w.engines.values() if not engine.dead)


# -- the flow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [0, 8])
@pytest.mark.parametrize("length", [29, 30, 32])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_prompt_computed_in_chunks_is_received_whole_and_both_sides_give_their_blocks_back(skip, length, ranks):
    w, h = started(list(range(length)), skip, decode_ranks=ranks)
    for _ in range(6):
        w.prefill.compute(h, 6)
        w.advance(1.0)
    received = w.decode.results[h]
    assert received == Received(h, received.first, received.byte_ns)
    assert w.prefill.results[h] == Closed(h, "released")
    assert all_free(w)
    assert w.decode.protocol.stats().results == {"received": {"": 1}}
    assert w.prefill.protocol.stats().results == {"closed": {"released": 1}}


def test_blocks_are_read_while_prefill_computes_on():
    w, h = started(computed=16)
    assert w.decode.protocol.snapshot(w.decode.now)[0].num_bytes == 4  # the model counts a block as a byte
    w.prefill.compute(h, 100)
    w.settle()
    assert w.decode.protocol.stats().bytes_overlapped == 4
    assert w.decode.protocol.stats().bytes_read == {"fake": 8}


def test_a_partial_block_is_read_only_when_the_prompt_ends_in_it():
    w, h = started(computed=6)
    assert w.decode.protocol.snapshot(w.decode.now)[0].num_bytes == 1
    w.prefill.compute(h, 1)
    w.settle()
    assert w.decode.protocol.snapshot(w.decode.now)[0].num_bytes == 1
    w.prefill.compute(h, 1)
    w.settle()
    assert w.decode.protocol.snapshot(w.decode.now)[0].num_bytes == 2


def test_a_long_prompt_that_is_there_at_once_is_read_in_several_reads():
    prompt = list(range(2 * MAX_READ_TOKENS + 1))
    w, h = started(prompt, num_blocks=3000)
    w.prefill.compute(h, len(prompt))
    w.settle()
    assert isinstance(w.decode.results[h], Received)
    assert w.sent["Heartbeat"] == 3  # the first, and one after each read but the last


def test_a_handoff_lives_as_long_as_prefill_needs():
    w, h = started()
    w.advance(100.0)  # in prefill's queue
    for _ in range(30):
        w.prefill.compute(h, 1)
        w.advance(20.0)
    assert isinstance(w.decode.results[h], Received)


def test_both_sides_show_a_live_handoff():
    w, _ = started()
    w.advance(3.0)
    (at_decode,), (at_prefill,) = (e.protocol.snapshot(e.now) for e in (w.decode, w.prefill))
    assert (at_decode.role, at_decode.peer, at_decode.state) == ("decode", "p0", "reading")
    assert (at_prefill.role, at_prefill.peer, at_prefill.state) == ("prefill", "d", "computing")
    assert at_decode.age_s == at_prefill.age_s == 3.0
    assert 0 < at_decode.deadline_s <= CONFIG.progress_s + CONFIG.heartbeat_s
    assert 0 < at_prefill.deadline_s <= CONFIG.lease_s


# -- messages that are lost, doubled, late ---------------------------------------------------------------------


@pytest.mark.parametrize("lost", [Progress, Heartbeat, Release, Released])
@pytest.mark.parametrize("chunk", [7, 30])
def test_no_single_lost_message_matters(lost, chunk):
    w = World()
    remote_request = w.decode.open(PROMPT)
    w.prefill.accept(remote_request)
    for _ in range(40):
        w.prefill.compute(remote_request.handoff_id, chunk)
        for flight in list(w.network):
            if isinstance(flight.envelope.message, lost) and lost is not None:
                w.network.remove(flight)
                lost = ()
        w.advance(0.25)
    assert isinstance(w.decode.results[remote_request.handoff_id], Received)
    assert all_free(w)


def test_a_repeated_release_gets_the_same_answer():
    w, h = started(computed=30)
    assert isinstance(w.decode.results[h], Received)
    w.prefill.protocol.receive(Envelope(w.decode.peer, w.prefill.peer.epoch, Release(h, 1)), w.prefill.now)
    assert [message for _, message in w.prefill.protocol.out.messages] == [
        Released(h, 1, True, w.decode.results[h].byte_ns)
    ]


def test_nobody_but_the_decode_engine_itself_can_release_its_handoff():
    w, h = started(prefills=2)
    other = msgspec.structs.replace(w.decode.peer, epoch=999)
    for message in (Release(h, 1), Cancel(h, 1), Heartbeat(h, 1, 1)):
        w.prefill.protocol.receive(Envelope(other, w.prefill.peer.epoch, message), w.prefill.now)
    answers = [message for to, message in w.prefill.protocol.out.messages if to == other]
    assert answers == [Released(h, 1, held=False), Refused(h, 1, "unknown")]
    assert h in w.prefill.jobs


def test_a_late_heartbeat_of_a_released_handoff_does_not_spoil_its_release():
    w, h = started()
    w.prefill.compute(h, 30)
    while not w.messages(Release):
        w.deliver(w.network.pop(0)) if w.network else w.decode.read_step(w.decode.reads[0])
        if w.decode.answers:
            w.decode.hear_worker()
    release = next(f for f in w.network if isinstance(f.envelope.message, Release))
    w.network.remove(release)
    w.deliver(release)
    released = next(f for f in w.network if isinstance(f.envelope.message, Released))
    w.network.remove(released)
    w.prefill.protocol.receive(Envelope(w.decode.peer, w.prefill.peer.epoch, Heartbeat(h, 1, 99)), w.prefill.now)
    w.prefill.flush()
    w.settle()
    w.deliver(released)
    assert isinstance(w.decode.results[h], Received)


def test_an_older_progress_that_comes_late_changes_nothing():
    w, h = started()
    w.prefill.compute(h, 8)
    late = w.network.pop()
    w.prefill.compute(h, 8)
    w.settle()
    w.deliver(late)
    assert w.decode.protocol.snapshot(w.decode.now)[0].num_bytes == 4
    w.prefill.compute(h, 100)
    w.settle()
    assert isinstance(w.decode.results[h], Received)


def test_progress_of_an_older_attempt_is_answered_by_cancel_and_counted():
    w = World(prefills=2)
    first = w.decode.open(PROMPT, attempt=1)
    w.decode.remote_prefill_failed(first.handoff_id)
    second = w.decode.open(PROMPT, attempt=2)
    w.engines["p0"].accept(first)  # the call had failed, but arrived
    w.engines["p1"].accept(second)
    w.settle()
    assert w.prefill.results[first.handoff_id] == Closed(first.handoff_id, "cancelled")
    assert w.decode.protocol.stats().stale_messages == 1
    w.engines["p1"].compute(second.handoff_id, 30)
    w.settle()
    assert isinstance(w.decode.results[second.handoff_id], Received)


def test_of_two_engines_that_got_the_same_prefill_request_the_second_is_told_to_cancel():
    w = World(prefills=2)
    remote_request = w.decode.open(PROMPT)
    w.engines["p0"].accept(remote_request)
    w.settle()
    w.engines["p1"].accept(remote_request)
    w.settle()
    assert w.engines["p1"].results[remote_request.handoff_id].reason == "cancelled"
    w.engines["p0"].compute(remote_request.handoff_id, 30)
    w.settle()
    assert isinstance(w.decode.results[remote_request.handoff_id], Received)


def test_a_prefill_request_that_comes_again_after_its_lease_proves_nothing_that_was_read_before():
    w, h = started()
    remote_request = w.prefill.jobs[h].remote_request
    w.prefill.compute(h, 12)
    w.settle(reads=False)
    w.decode.paused = True
    w.advance(30.0, reads=False)
    w.decode.read_step(w.decode.reads[0])
    assert w.prefill.results[h].reason == "expired"
    w.prefill.accept(remote_request)
    w.prefill.compute(h, 12)
    w.network = [f for f in w.network if not isinstance(f.envelope.message, Refused)]
    w.decode.paused = False
    w.settle()
    assert w.decode.results[h] == Failed(h, "lost_lease", 0, True, "unknown")
    assert all_free(w)


def test_a_message_for_the_engine_that_was_here_before_is_dropped_and_counted():
    w, h = started()
    envelope = Envelope(w.decode.peer, w.prefill.peer.epoch + 1000, Cancel(h, 1))
    w.prefill.protocol.receive(envelope, w.prefill.now)
    assert h in w.prefill.jobs
    assert w.prefill.protocol.stats().stale_messages == 1


# -- prefill dies ----------------------------------------------------------------------------------------------


def test_prefill_that_dies_before_it_has_answered_costs_one_attempt():
    w = World()
    remote_request = w.decode.open(PROMPT, skip=8)
    w.crash("p0")
    w.decode.remote_prefill_failed(remote_request.handoff_id, "replica died", retry=True)
    assert w.decode.results[remote_request.handoff_id] == Failed(
        remote_request.handoff_id, "remote_prefill_failed", verified=8, retry=True, detail="replica died"
    )
    assert all_free(w)


def test_a_prefill_request_that_nobody_answers_is_given_up_after_accept_s():
    w = World()
    remote_request = w.decode.open(PROMPT)
    w.advance(CONFIG.accept_s)
    assert not w.decode.results
    w.advance(CONFIG.heartbeat_s)
    assert w.decode.results[remote_request.handoff_id].reason == "not_accepted"
    assert w.decode.results[remote_request.handoff_id].retry


@pytest.mark.parametrize("told", [True, False])
def test_prefill_that_dies_during_the_transfer_leaves_decode_the_verified_chunks(told):
    w, h = started(computed=19)
    w.prefill.compute(h, 4)
    w.settle(reads=False)
    w.crash("p0")
    if told:  # the prefill request's call has failed
        w.decode.remote_prefill_failed(h)
        w.settle()
    else:
        w.advance(CONFIG.progress_s + 2 * CONFIG.heartbeat_s)
    failed = w.decode.results[h]
    assert failed.verified == 16
    assert failed.retry
    assert all_free(w)


def test_what_was_read_after_the_last_answer_of_prefill_is_not_verified():
    w, h = started(computed=8)
    w.prefill.compute(h, 8)
    w.settle(reads=False)
    w.prefill.paused = True
    w.settle()  # one-sided: the read ends well, and it is even right; but nobody says so
    w.advance(CONFIG.progress_s + 2 * CONFIG.heartbeat_s)
    assert w.decode.results[h].reason == "silent"
    assert w.decode.results[h].verified == 8


def test_an_echo_of_a_heartbeat_that_was_sent_before_a_read_ended_does_not_prove_it():
    w, h = started(computed=12, read=False)
    w.advance(CONFIG.heartbeat_s, settle=False)
    heartbeat = next(f for f in w.network if isinstance(f.envelope.message, Heartbeat))
    w.deliver_now(heartbeat)
    echo = w.network.pop()
    assert echo.envelope.message.echo == heartbeat.envelope.message.number
    w.decode.paused = True
    w.advance(30.0, settle=False)
    assert w.prefill.results[h].reason == "expired"  # and its blocks hold other KV now
    w.decode.paused = False
    while w.decode.reads:
        w.decode.read_step(w.decode.reads[0])
    w.decode.hear_worker()
    w.deliver(echo)
    w.decode.remote_prefill_failed(h)
    assert w.decode.results[h].verified == 0


def test_an_echo_of_a_heartbeat_that_was_never_sent_proves_nothing():
    w, h = started()
    w.prefill.compute(h, 12)
    progress = w.messages(Progress)[-1]
    w.settle(reads=False)
    envelope = Envelope(w.prefill.peer, w.decode.peer.epoch, msgspec.structs.replace(progress, echo=1000))
    w.decode.read_step(w.decode.reads[0])
    w.lossy = True
    w.settle()
    w.decode.protocol.receive(envelope, w.decode.now)
    w.decode.remote_prefill_failed(h)
    assert w.decode.results[h].verified == 0


def test_the_death_of_prefill_after_release_is_not_noticed():
    w, h = started(computed=30)
    w.crash("p0")
    w.advance(60.0)
    assert isinstance(w.decode.results[h], Received)
    assert w.decode.protocol.stats().results == {"received": {"": 1}}


def test_prefill_that_dies_before_it_confirms_the_release_leaves_what_is_proven():
    w, h = started(computed=20)
    w.prefill.compute(h, 10)
    while not w.messages(Release):
        w.deliver(w.network.pop(0)) if w.network else w.decode.read_step(w.decode.reads[0])
        if w.decode.answers:
            w.decode.hear_worker()
    w.crash("p0")
    w.advance(20.0)
    assert w.decode.results[h].reason == "silent"
    assert w.decode.results[h].verified == 20


# -- decode dies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 19, 30])
def test_the_death_of_decode_frees_the_blocks_at_prefill_one_lease_later(tokens):
    w, h = started(computed=tokens, read=False)
    w.crash("d")
    w.advance(CONFIG.lease_s - 0.5)
    assert h in w.prefill.jobs
    w.advance(0.5)
    assert w.prefill.results[h] == Closed(h, "expired")
    assert w.prefill.protocol.stats().lease_expiries == 1
    assert all_free(w)


# -- the client leaves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 19, 30])
@pytest.mark.parametrize("ranks", [1, 2])
def test_when_the_client_leaves_both_sides_are_free_at_once(tokens, ranks):
    w, h = started(decode_ranks=ranks, computed=tokens, read=False)
    w.decode.cancel(h)
    w.settle()
    assert w.decode.results[h] == Failed(h, "cancelled", 0, False)
    assert w.prefill.results[h] == Closed(h, "cancelled")
    assert all_free(w)


def test_a_cancelled_handoff_fails_only_when_every_rank_has_stopped_reading():
    w, h = started(decode_ranks=2, computed=30, read=False)
    w.decode.cancel(h)
    first, second = w.decode.reads
    w.decode.read_step(first)
    w.decode.hear_worker()
    w.settle(reads=False)
    assert not w.decode.results
    assert h in w.prefill.jobs  # not told to give the blocks up while they are read
    w.decode.read_step(second)
    w.decode.hear_worker()
    assert w.decode.results[h].reason == "cancelled"


def test_a_lost_cancel_is_said_again_when_prefill_asks():
    w, h = started()
    w.decode.cancel(h)
    w.network.clear()
    w.advance(2 * CONFIG.heartbeat_s)
    assert w.prefill.results[h] == Closed(h, "cancelled")


def test_a_cancel_before_prefill_has_answered_reaches_it_when_it_does():
    w = World()
    remote_request = w.decode.open(PROMPT)
    w.decode.cancel(remote_request.handoff_id)
    assert w.decode.results[remote_request.handoff_id].reason == "cancelled"
    w.prefill.accept(remote_request)
    w.settle()
    assert w.prefill.results[remote_request.handoff_id].reason == "cancelled"


# -- the link --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 19, 30])
def test_a_cut_link_ends_the_handoff_on_both_sides_and_the_pair_rests(tokens):
    w, h = started()
    w.lossy = True
    if tokens:
        w.prefill.compute(h, tokens)
    w.advance(CONFIG.progress_s + 2 * CONFIG.heartbeat_s)
    assert w.decode.results[h].reason == "silent"
    assert w.decode.results[h].retry
    assert w.decode.protocol.quarantined() == ["p0"]
    w.advance(CONFIG.lease_s)
    assert w.prefill.results[h].reason == "expired"
    assert all_free(w)
    w.lossy = False
    w.advance(CONFIG.quarantine_s)
    assert w.decode.protocol.quarantined() == []


def test_a_link_that_is_cut_in_one_direction_ends_the_handoff_too():
    w, h = started()
    for _ in range(60):
        w.network = [f for f in w.network if f.address != w.prefill.peer.address]
        w.advance(0.25, settle=False)
        for flight in w.network:
            if flight.address == w.decode.peer.address:
                w.deliver(flight)
        w.network.clear()
    assert w.decode.results[h].reason == "silent"
    assert w.prefill.results[h].reason == "expired"


def test_a_read_that_fails_stops_the_other_ranks_and_keeps_what_was_proven():
    w, h = started(decode_ranks=2, computed=12)
    w.prefill.compute(h, 12)
    w.settle(reads=False)
    w.decode.read_step(w.decode.reads[0], error="checksum")
    w.decode.hear_worker()
    assert [read.stopping for read in w.decode.reads] == [True]
    w.settle()
    assert w.decode.results[h] == Failed(h, "read", 12, True, "rank 0: checksum")
    assert w.prefill.results[h].reason == "cancelled"
    assert w.decode.protocol.quarantined() == ["p0"]


def test_a_prefill_request_that_reaches_a_quarantined_engine_is_not_read_from_it():
    w, _h = started(computed=12, read=False)
    w.decode.read_step(w.decode.reads[0], error="no progress")
    w.settle()
    remote_request = w.decode.open(PROMPT)
    w.prefill.accept(remote_request)
    w.settle()
    assert w.decode.results[remote_request.handoff_id].reason == "quarantined"
    assert w.decode.results[remote_request.handoff_id].retry
    assert w.prefill.results[remote_request.handoff_id].reason == "cancelled"


def test_after_a_failed_link_its_connections_are_dropped_unless_another_handoff_uses_them():
    w, first = started()
    second = w.decode.open(PROMPT)
    w.prefill.accept(second)
    w.settle()
    for h in (first, second.handoff_id):
        w.prefill.compute(h, 12)
    w.settle(reads=False)
    commands = []
    w.decode.protocol.out.commands = commands_seen = CopyingList(commands)
    w.decode.read_step(w.decode.reads[0], error="no progress")
    w.decode.hear_worker()
    assert not [c for c in commands if isinstance(c, DropSource)]
    w.decode.read_step(w.decode.reads[0], error="no progress")
    w.decode.hear_worker()
    assert commands_seen is w.decode.protocol.out.commands
    assert [c for c in commands if isinstance(c, DropSource)] == [DropSource(w.prefill.peer.epoch)]


def test_connections_to_an_engine_that_is_not_used_are_dropped_after_a_while():
    w, _h = started(computed=30)
    commands = []
    w.decode.protocol.out.commands = CopyingList(commands)
    w.advance(120.0)
    assert commands == [DropSource(w.prefill.peer.epoch)]


def test_a_read_that_crawls_is_ended():
    w, h = started()
    w.prefill.compute(h, 12)
    w.advance((READ_LIMIT + 1) * CONFIG.progress_s, reads=False)
    w.settle()
    assert w.decode.results[h].reason == "read"
    assert "too long" in w.decode.results[h].detail


# -- pauses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 19, 30])
@pytest.mark.parametrize("pause", [3.0, 30.0])
def test_prefill_paused_and_resumed_harms_nobody(tokens, pause):
    w, h = started()
    if tokens:
        w.prefill.compute(h, tokens)
    w.prefill.paused = True
    w.advance(pause)
    w.prefill.paused = False
    w.advance(1.0)
    if pause < CONFIG.progress_s:
        w.prefill.compute(h, 30)
        w.settle()
        assert isinstance(w.decode.results[h], Received)
    else:
        assert w.decode.results[h].reason == "silent"
        assert h in w.prefill.results
    assert all_free(w)


def test_late_answers_of_a_prefill_engine_that_was_paused_past_the_lease_are_dropped_and_counted():
    w, h = started()
    w.prefill.paused = True
    w.advance(30.0)
    assert w.decode.results[h].reason == "silent"
    w.prefill.compute(h, 30)  # what its step loop does first after the pause
    w.settle()
    w.prefill.paused = False
    w.settle()
    assert w.decode.protocol.stats().stale_messages >= 1
    assert all_free(w)


@pytest.mark.parametrize("reading", [True, False])
def test_decode_paused_past_the_lease_keeps_only_what_was_proven_before(reading):
    w, h = started(computed=12)
    w.prefill.compute(h, 18)
    w.settle(reads=False)
    w.decode.paused = True
    w.advance(30.0, reads=not reading)
    assert w.prefill.results[h].reason == "expired"  # and its blocks hold other KV now
    w.decode.paused = False
    w.settle()
    failed = w.decode.results[h]
    assert failed.reason == "lost_lease"
    assert failed.verified == 0
    assert all_free(w)


def test_a_release_after_the_lease_is_answered_by_not_held():
    w, h = started(computed=30, read=False)
    w.decode.paused = True
    w.advance(30.0)
    w.network = [f for f in w.network if not isinstance(f.envelope.message, Refused)]
    w.decode.paused = False
    w.settle()
    assert w.decode.results[h].reason == "lost_lease"
    assert w.sent["Released"] == 1
    assert all_free(w)


def test_decode_that_was_paused_for_less_than_the_lease_goes_on():
    w, h = started()
    w.decode.paused = True
    w.advance(CONFIG.lease_s - 2 * CONFIG.heartbeat_s)
    w.decode.paused = False
    w.decode.tick()  # before it has seen what came meanwhile
    w.settle()
    w.prefill.compute(h, 30)
    w.settle()
    assert isinstance(w.decode.results[h], Received)


# -- prefill cannot ----------------------------------------------------------------------------------------------


def test_prefill_without_room_refuses_at_once():
    w = World()
    w.prefill.free.clear()
    remote_request = w.decode.open(PROMPT, skip=4)
    w.prefill.check = lambda: None
    w.prefill.accept(remote_request)
    w.settle()
    assert w.decode.results[remote_request.handoff_id] == Failed(
        remote_request.handoff_id, "refused", 4, True, "no room"
    )


def test_a_handoff_that_prefill_gives_up_keeps_its_blocks_until_decode_has_stopped_reading():
    w, h = started(computed=12)
    w.prefill.compute(h, 8)
    w.settle(reads=False)
    w.prefill.refuse(h, "aborted")
    w.settle(reads=False)
    assert h in w.prefill.jobs
    w.settle()
    assert w.decode.results[h] == Failed(h, "refused", 12, True, "aborted")
    assert w.prefill.results[h].reason == "cancelled"


def test_heartbeats_do_not_extend_the_lease_of_a_handoff_that_was_given_up():
    w, h = started()
    w.prefill.refuse(h)
    w.network.clear()
    for number in range(100, 130):
        envelope = Envelope(w.decode.peer, w.prefill.peer.epoch, Heartbeat(h, 1, number))
        w.prefill.protocol.receive(envelope, w.prefill.now)
        w.advance(0.5, settle=False)
    assert w.prefill.results[h].reason == "expired"


def test_another_prompt_than_asked_for_is_not_received():
    w, h = started(skip=4, computed=12)
    w.prefill.compute(h, 100, wrong_prompt_hash=True)
    w.settle()
    assert w.decode.results[h] == Failed(h, "prompt_hash", 4, False, "prefill computed a different prompt")
    assert all_free(w)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"upto": 31, "blocks": [0] * 8}, "31 tokens computed of 30"),
        ({"upto": 20, "blocks": [0] * 4}, "4 blocks named for 20 tokens"),
        ({"upto": 20, "blocks": [-1] * 5}, "blocks that were read have changed"),
        ({"first": FirstToken(1, None, b"", 0)}, "first token known, but only 12 of 30 tokens computed"),
    ],
)
def test_an_engine_that_contradicts_itself_is_not_believed(change, problem):
    w, h = started()
    w.prefill.compute(h, 12)
    progress = w.messages(Progress)[-1]
    w.settle()
    envelope = Envelope(w.prefill.peer, w.decode.peer.epoch, msgspec.structs.replace(progress, **change))
    w.decode.protocol.receive(envelope, w.decode.now)
    w.decode.flush()
    assert w.decode.results[h] == Failed(h, "protocol", 0, False, problem)


# -- a rank that does not answer ---------------------------------------------------------------------------------


def test_an_engine_whose_rank_does_not_stop_writing_is_broken():
    w, h = started(decode_ranks=2, computed=30, read=False)
    w.decode.cancel(h)
    w.decode.read_step(w.decode.reads[0])
    w.advance(2 * CONFIG.progress_s, reads=False)
    assert w.decode.protocol.broken is None
    w.advance(2 * CONFIG.heartbeat_s, reads=False)
    assert w.decode.protocol.broken == f"rank 1 does not stop reading for handoff {h}"
    assert not w.decode.results  # its blocks are never given back


def test_a_read_is_the_same_command_for_every_rank():
    w, h = started(decode_ranks=2)
    commands = []
    w.decode.protocol.out.commands = CopyingList(commands)
    w.prefill.compute(h, 8)
    w.settle()
    (read,) = commands
    assert isinstance(read, Read)
    assert read.source_epoch == w.prefill.peer.epoch
    assert len(read.source_blocks) == len(read.local_blocks) == 8 // BLOCK


def test_an_answer_for_a_read_that_is_over_is_dropped_and_counted():
    w, _h = started(computed=12, read=False)
    w.decode.read_step(w.decode.reads[0], error="no progress")
    answer = w.decode.answers[0]
    w.decode.hear_worker()
    w.decode.protocol.read_ended(answer, w.decode.now)
    assert w.decode.protocol.stats().stale_messages == 1


class CopyingList(list):
    """Remembers in `kept` all that was ever appended."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def append(self, item):
        super().append(item)
        self.kept.append(item)


# -- requests that move ------------------------------------------------------------------------------------


HELD = list(range(11))


def test_a_held_request_is_read_by_the_engine_that_claims_it():
    w = World()
    h = w.prefill.hold(HELD).handoff_id
    assert not w.network, "nobody is told: the client's ingress chooses who goes on"
    w.decode.open(HELD, 4, w.prefill.peer, handoff_id=h)
    w.settle()
    assert isinstance(w.decode.results[h], Received)
    assert w.prefill.results[h].reason == "released"


def test_a_claim_is_repeated_until_it_is_answered_and_answered_as_often():
    w = World()
    h = w.prefill.hold(HELD).handoff_id
    w.decode.open(HELD, 0, w.prefill.peer, handoff_id=h)
    w.network.clear()
    w.advance(1.0, settle=False)
    (claim,) = w.network
    w.deliver(claim)
    w.settle()
    assert isinstance(w.decode.results[h], Received)
    w.deliver(claim)
    w.settle()
    assert not w.prefill.protocol.prefill_handoffs


def test_only_the_first_engine_that_claims_a_request_gets_it():
    w = World(prefills=2)
    h = w.prefill.hold(HELD).handoff_id
    for engine in (w.decode, w.engines["p1"]):
        engine.open(HELD, 0, w.prefill.peer, handoff_id=h)
    w.settle()
    assert isinstance(w.decode.results[h], Received)
    assert w.engines["p1"].results[h].reason in ("refused", "lost_lease")


def test_a_request_that_nobody_claims_is_held_for_one_lease():
    w = World()
    h = w.prefill.hold(HELD).handoff_id
    w.advance(CONFIG.lease_s - 1)
    assert not w.prefill.results
    w.advance(2)
    assert w.prefill.results[h].reason == "expired"
    w.decode.open(HELD, 0, w.prefill.peer, handoff_id=h)
    w.settle()
    assert w.decode.results[h].reason == "lost_lease"


def test_a_held_request_of_another_model_or_version_is_refused_and_held_no_longer():
    w = World()
    h = w.prefill.hold(HELD, fingerprint="other").handoff_id
    w.decode.open(HELD, 0, w.prefill.peer, handoff_id=h)
    w.settle()
    assert w.decode.results[h].reason == "refused"
    assert w.prefill.results[h].reason == "cancelled"
    assert not w.prefill.protocol.prefill_handoffs
