"""Times of pipeline stages."""

from __future__ import annotations

from engine.parts.stages.rank.stage_times import BusyTime, WorkingTime


def test_a_stage_is_busy_for_its_steps_without_their_waits_and_reads_only_those_that_have_ended():
    busy, read = BusyTime(), []

    def seconds(value: float):
        return lambda: read.append(value) or value

    busy.launched(1, seconds(2.0), [seconds(0.5), seconds(0.25)])
    busy.launched(2, seconds(8.0), [])
    assert busy.before(1) == 0.0
    assert not read
    assert busy.before(2) == 1.25
    assert busy.before(2) == 1.25
    assert busy.before(3) == 9.25


def test_an_engine_works_while_a_step_is_under_way_and_overlapping_steps_count_once():
    now = [10.0]
    working = WorkingTime(lambda: now[0])
    for at, change in (
        (10.0, working.begin),
        (11.0, working.begin),
        (14.0, working.end),
        (15.0, working.end),
        (30.0, working.begin),
        (31.5, working.end),
    ):
        now[0] = at
        change()
    assert working.total_s == 6.5
