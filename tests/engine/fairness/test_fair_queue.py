from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.fairness.fair_queue import FairQueue, QueuedRequest


def fill(queue: FairQueue, client: str, count: int, tokens: int = 1) -> list[QueuedRequest]:
    tickets = [QueuedRequest(client, 1, tokens) for _ in range(count)]
    for ticket in tickets:
        assert queue.offer(ticket) == []
    return tickets


def serve_one(queue: FairQueue, output_tokens: int = 1) -> str:
    """Start the next request of a queue whose window is 1, and end it. Returns its client."""
    (ticket,) = queue.start()
    queue.charge(ticket, output_tokens)
    queue.leave(ticket)
    return ticket.client


def test_requests_of_one_client_run_in_the_order_they_came():
    queue = FairQueue(2, 10, 100)
    tickets = fill(queue, "a", 4)
    assert queue.start() == tickets[:2]
    queue.leave(tickets[0])
    assert queue.start() == tickets[2:3]


def test_newcomer_is_next_after_a_flood_of_another_client():
    queue = FairQueue(1, 1000, 10_000)
    fill(queue, "flood", 500)
    served = [serve_one(queue) for _ in range(20)]
    fill(queue, "late", 5)
    served = [serve_one(queue) for _ in range(10)]
    assert served.count("late") == 5


def test_clients_get_equal_tokens_not_equal_requests():
    queue = FairQueue(1, 1000, 10_000)
    fill(queue, "long", 100)
    fill(queue, "short", 400)
    served = {"long": 0, "short": 0}
    for _ in range(220):
        (ticket,) = queue.start()
        count = 10 if ticket.client == "long" else 1
        queue.charge(ticket, count)
        queue.leave(ticket)
        served[ticket.client] += 1 + 2 * count
    assert abs(served["long"] - served["short"]) <= 2 * 21


def test_clients_get_equal_time_of_engines_where_that_is_known_however_many_tokens_they_get():
    queue = FairQueue(1, 1000, 100_000)
    fill(queue, "prompts", 300, tokens=50)
    fill(queue, "answers", 300)
    seconds = {"prompts": 0.0, "answers": 0.0}
    for _ in range(300):
        (ticket,) = queue.start()
        count, took = (1, 0.1) if ticket.client == "prompts" else (20, 0.5)
        queue.charge(ticket, count)
        queue.settle(ticket, took)
        queue.leave(ticket)
        seconds[ticket.client] += took
    assert abs(seconds["prompts"] - seconds["answers"]) < 0.1 * sum(seconds.values())


def test_what_a_request_has_cost_may_be_known_after_it_has_left_but_is_not_charged_to_a_client_that_came_anew():
    def served(queue: FairQueue) -> float:
        return queue._clients["a"].served

    queue = FairQueue(10, 1000, 10_000)
    for client in ("a", "a", "a", "b"):
        assert queue.offer(QueuedRequest(client, 1, 10)) == []
    left, other, last, of_b = sorted(queue.start(), key=lambda queued: queued.client)
    queue.settle(of_b, 1.0)  # so much for ten tokens
    queue.leave(left)
    before = served(queue)
    queue.settle(left, 5.0)
    assert served(queue) > before
    queue.leave(other)
    queue.leave(last)
    assert queue.offer(QueuedRequest("a", 1, 10)) == []
    before = served(queue)
    queue.settle(last, 0.0)
    queue.settle(other, 5.0)
    assert served(queue) == before


def test_being_away_earns_nothing():
    queue = FairQueue(1, 1000, 10_000)
    fill(queue, "a", 1)
    serve_one(queue)
    fill(queue, "b", 300)
    for _ in range(100):
        serve_one(queue)
    fill(queue, "a", 100)
    served = [serve_one(queue) for _ in range(20)]
    assert 9 <= served.count("a") <= 11


def test_client_with_only_a_running_request_saves_no_turns_either():
    queue = FairQueue(2, 1000, 10_000)
    fill(queue, "a", 1)
    (long_lived,) = queue.start()
    fill(queue, "b", 300)
    for _ in range(100):
        serve_one(queue)
    fill(queue, "a", 100)
    served = [serve_one(queue) for _ in range(20)]
    assert long_lived.state == "running"
    assert 9 <= served.count("a") <= 11


def test_full_queue_refuses_its_largest_client():
    queue = FairQueue(1, 10, 1000)
    fill(queue, "a", 10)
    queue.start()
    fill(queue, "a", 1)
    assert queue.is_full_for("a")
    assert queue.offer(QueuedRequest("a", 1, 1)) is None


def test_room_for_a_newcomer_is_taken_from_the_largest_client_newest_first():
    queue = FairQueue(1, 10, 1000)
    tickets = fill(queue, "a", 10)
    queue.start()
    tickets += fill(queue, "a", 1)
    newcomer = QueuedRequest("b", 2, 1)
    assert not queue.is_full_for("b")
    assert queue.offer(newcomer) == [tickets[10], tickets[9]]
    assert [t.state for t in tickets[9:]] == ["gone", "gone"]
    assert queue.num_waiting == 10


def test_tokens_limit_the_queue_as_well():
    queue = FairQueue(1, 100, 1000)
    fill(queue, "a", 1, tokens=900)
    fill(queue, "b", 1, tokens=50)
    assert queue.offer(QueuedRequest("b", 1, 900)) is None
    assert queue.offer(QueuedRequest("c", 1, 60)) is not None


def test_request_larger_than_the_queue_may_wait_alone():
    queue = FairQueue(1, 10, 1000)
    assert queue.offer(QueuedRequest("a", 50, 5000)) == []
    assert len(queue.start()) == 1
    assert queue.num_running == 50
    assert queue.start() == []


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(1, 8))
def test_with_equal_requests_no_client_is_two_turns_ahead_of_one_that_waits(clients, window):
    queue = FairQueue(window, 1000, 10_000)
    for client in clients:
        fill(queue, client, 1)
    turns = dict.fromkeys("abc", 0)
    running: list[QueuedRequest] = []
    while queue.num_waiting:
        running += queue.start()
        ticket = running.pop(0)
        queue.charge(ticket, 1)
        queue.leave(ticket)
        turns[ticket.client] += 1
        left = [name for name in "abc" if turns[name] < clients.count(name)]
        assert all(turns[ahead] - turns[name] <= window + 1 for name in left for ahead in "abc")


class Machine(RuleBasedStateMachine):
    """Any order of calls: the counts stay right, and nobody is forgotten."""

    @initialize(window=st.integers(1, 5), max_waiting=st.integers(1, 8), max_tokens=st.integers(1, 40))
    def begin(self, window: int, max_waiting: int, max_tokens: int) -> None:
        self.queue = FairQueue(window, max_waiting, max_tokens)
        self.max_waiting, self.max_tokens = max_waiting, max_tokens
        self.tickets: list[QueuedRequest] = []

    @rule(client=st.sampled_from("abcd"), sequences=st.integers(1, 10), tokens=st.integers(0, 50))
    def offer(self, client: str, sequences: int, tokens: int) -> None:
        before = self.in_state("waiting")
        ticket = QueuedRequest(client, sequences, tokens)
        dropped = self.queue.offer(ticket)
        if dropped is None:
            assert ticket.state == "new"
            assert self.in_state("waiting") == before
        else:
            assert all(t.client != client and t.state == "gone" for t in dropped)
            self.tickets.append(ticket)

    @rule()
    def start(self) -> None:
        started = self.queue.start()
        assert all(t.state == "running" for t in started)
        assert self.queue.num_running >= self.queue.window or not self.queue.num_waiting

    @rule(window=st.integers(1, 5))
    def change_window(self, window: int) -> None:
        self.queue.window = window

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        live = self.in_state("waiting") + self.in_state("running")
        if live:
            ticket = data.draw(st.sampled_from(live))
            if ticket.state == "running":
                self.queue.charge(ticket, 3)
            self.queue.leave(ticket)
            self.queue.leave(ticket)

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "queue"):
            return
        waiting, running = self.in_state("waiting"), self.in_state("running")
        assert self.queue.num_waiting == sum(t.sequences for t in waiting)
        assert self.queue.num_running == sum(t.sequences for t in running)
        assert self.queue.waiting_tokens == sum(t.prompt_tokens for t in waiting)
        assert len(waiting) <= 1 or self.queue.num_waiting <= self.max_waiting
        assert len(waiting) <= 1 or self.queue.waiting_tokens <= self.max_tokens

    def in_state(self, state: str) -> list[QueuedRequest]:
        return [t for t in self.tickets if t.state == state]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30)
