from __future__ import annotations

from deployments.parts.tape.slo_alarm import LATE, NEWEST, PAUSE_S, SloAlarm


def alarms(alarm: SloAlarm, seconds: list[float], now: float = PAUSE_S) -> list[str]:
    return [reason for each in seconds if (reason := alarm.observe(each, now))]


def test_a_few_late_requests_are_no_alarm():
    assert alarms(SloAlarm(1.0), ([2.0] + [0.5] * 9) * 50) == []


def test_when_many_become_late_there_is_one_alarm():
    (reason,) = alarms(SloAlarm(1.0), [0.5] * NEWEST + [2.0] * 500)
    assert reason == f"{LATE + 1} of the newest {NEWEST} first tokens came after more than 1 s"


def test_the_next_alarm_comes_after_it_was_well_and_after_a_pause():
    alarm = SloAlarm(1.0)
    bad, well = [0.5] * NEWEST + [2.0] * NEWEST, [0.5] * NEWEST
    assert len(alarms(alarm, bad)) == 1
    assert alarms(alarm, well + bad) == [], "too soon"
    assert alarms(alarm, [2.0] * NEWEST, 3 * PAUSE_S), "it was well between, and the pause is over"
    assert alarms(alarm, [2.0] * NEWEST, 9 * PAUSE_S) == [], "it has not been well since"
    assert len(alarms(alarm, well + bad, 9 * PAUSE_S)) == 1
