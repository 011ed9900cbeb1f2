from engine.kv_transfer.journal import MAX_LINES, MAX_REQUESTS, Journal


def test_the_lines_of_a_request_come_in_the_order_in_which_they_were_written():
    journal = Journal()
    journal.add("a", 1.0, "accepted")
    journal.add("b", 2.0, "accepted")
    journal.add("a", 3.0, "received")
    assert journal.of("a") == [(1.0, "accepted"), (3.0, "received")]
    assert journal.of("unknown") == []


def test_of_many_requests_those_with_the_oldest_news_are_forgotten():
    journal = Journal()
    for number in range(MAX_REQUESTS):
        journal.add(f"r{number}", 0.0, "accepted")
    journal.add("r0", 1.0, "received")
    journal.add("one more", 2.0, "accepted")
    assert len(journal.of("r0")) == 2
    assert journal.of("r1") == []
    assert len(journal.of("r2")) == 1


def test_a_request_without_end_does_not_fill_the_journal():
    journal = Journal()
    for number in range(2 * MAX_LINES):
        journal.add("a", number, "again")
    assert len(journal.of("a")) == MAX_LINES
