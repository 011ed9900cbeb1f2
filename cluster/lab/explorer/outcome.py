"""The replay of a whole tape."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from cluster.lab.recorded.metered_replay import MeteredReplay
from cluster.lab.simulator.billing.costs import Costs
from cluster.lab.tape.replay import Diverged, Failed, Replay
from cluster.lab.tape.tapes import why_not
from deployments.billing.prices import FREE, Prices
from engine.parts.tape.engine_tape import EngineTape


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    engine_id: str
    role: str
    seconds: float  #: of the tape
    requests: int  #: that ended
    steps: int  #: that were replayed
    plans: int  #: recorded plans, and calls that planned nothing
    equal: int  #: of these, those that were replayed and were equal
    differs: bool
    problem: str = ""  #: the first decision that differs, or how the engine failed
    costs: Costs | None = None  #: None without prices

    @property
    def name(self) -> str:
        return self.engine_id

    def row(self) -> tuple[str, ...]:
        share = f"{self.equal} of {self.plans}"
        return self.engine_id, self.role or "-", f"{self.seconds:.1f}", str(self.requests), str(self.steps), share


def replay_whole(tape: EngineTape, prices: Prices = FREE) -> EngineOutcome:
    """Replay a tape up to its end, or to the first decision that differs."""
    try:
        replay = MeteredReplay(tape)
    except Exception as error:  # noqa: BLE001  why_not raises those that are no fault of the tape
        problem = f"the tape cannot be read by this version ({why_not(error, [tape])})"
        return EngineOutcome(tape.engine_id, tape.role, 0.0, 0, 0, 0, 0, differs=True, problem=problem)
    equal, steps, requests, problem, differs = 0, 0, 0, "", False
    try:
        for moment in replay.run():
            equal += moment.digest is not None
            steps += moment.commits
            requests += len(moment.ended)
    except Failed as failed:
        problem = f"{told(replay, failed)}; so it did when the tape was recorded"
    except Diverged as diverged:
        problem, differs = told(replay, diverged), True
    except Exception as error:  # noqa: BLE001  as above
        problem, differs = why_not(error, [tape]), True
    costs = None if prices == FREE or problem else replay.costs(prices)
    return EngineOutcome(
        tape.engine_id, tape.role, replay.seconds, requests, steps, replay.num_plans, equal, differs, problem, costs
    )


def told(replay: Replay, error: Diverged) -> str:
    """Return a sentence about the moment of an error."""
    moment = error.moment
    kind = "the end of a step" if moment.commits else type(moment.input).__name__
    what = kind if moment.digest is None else "a plan"
    return f"at #{error.index} ({clock_time(replay, moment.at)}), {what}: {error}"


def clock_time(replay: Replay, at: float) -> str:
    """Return the time of day, and seconds from the start of the tape."""
    when = datetime.fromtimestamp(replay.tape.wall_s + at, UTC)
    return f"{when:%H:%M:%S.%f} UTC, {at - replay.tape.segments[0].started_at:+.3f} s"
