"""Chooses the length of drafts. A token is drafted if its chance of acceptance is worth the cost of verifying it. Pure
Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.spec_decode.drafter import SequenceDrafter

OPTIMISM = 0.8  # acceptance rate assumed while nothing is known about a sequence
OPTIMISM_WEIGHT = 2.0  # weight of this assumption, as a number of drafted tokens
MEMORY = 40.0  # drafted tokens after which a token's weight is about 1/e
MAX_MISSES = 7  # pauses grow up to 2**7 tokens
REST = 16  # tokens for which drafting stops after no draft was found


@dataclass(slots=True)
class SequenceDrafts:
    """Drafts of one sequence, and their record of acceptance."""

    prediction: list[int] = field(default_factory=list)
    """Tokens of the output that the client predicts."""
    drafter: SequenceDrafter | None = None
    """None if a drafter with weights serves the sequence, or if nothing has been drafted yet."""
    started: bool = False
    """Whether drafting has been considered before, even if it was found not to pay."""
    proposed: list[int] = field(default_factory=list)
    """Tokens that a drafter with weights proposes after the newest one."""
    num_drafted: int = 0
    """Drafted tokens since the start. `num_accepted` counts the accepted ones."""
    num_accepted: int = 0
    resume_at: int = 0
    """Sequence length from which drafting resumes, after drafts were useless."""
    _tried: float = 0.0
    _accepted: float = 0.0
    _misses: int = 0
    _retries: bool = False

    def acceptance(self, length: int) -> float:
        """Return the probability that a drafted token is accepted if all drafts before it are accepted. Returns 0
        during a pause. After a pause, the sequence starts again with the assumed rate of a new one. length: length of
        the sequence."""
        if length < self.resume_at:
            return 0.0
        if self._retries:
            return OPTIMISM
        return (self._accepted + OPTIMISM * OPTIMISM_WEIGHT) / (self._tried + OPTIMISM_WEIGHT)

    @property
    def untried(self) -> bool:
        """Whether the acceptance rate is only assumed: at the start, and after a pause."""
        return self._retries or not self._tried

    def record(self, drafted: int, accepted: int, length: int) -> None:
        """Record how many of the drafted tokens were accepted. Tokens after the first rejected one are not recorded."""
        self.num_drafted += drafted
        self.num_accepted += accepted
        tried = accepted + (accepted < drafted)
        fade = 1.0 - tried / (tried + MEMORY)
        self._tried, self._accepted = self._tried * fade + tried, self._accepted * fade + accepted
        self._retries = False
        if accepted:
            self._misses = 0
        elif self._misses:
            self.pause(length)
        else:
            self._misses = 1

    def rest(self, length: int) -> None:
        """Stop drafting for REST tokens, because no draft was found."""
        self.resume_at = length + REST

    def pause(self, length: int) -> None:
        """Stop drafting for a while. Pauses grow until a draft is accepted."""
        self._misses, self._retries = min(self._misses + 1, MAX_MISSES), True
        self.resume_at = length + 2**self._misses


class StepDrafts:
    """The drafts of one step. Another draft token is worth its time as long as it raises the step's tokens per second.

    A step of n tokens takes `fixed + slope * n` seconds. Its expected yield is one token per sequence, and for each
    draft token the probability that this token and all before it are accepted. If many sequences already share the
    fixed cost of a step, as in a loaded engine, no draft is likely enough.
    """

    def __init__(self, sequences: int, fixed: float, slope: float, proposal: float = 0.0):
        """sequences: number of sequences that decode in this step. proposal: seconds that a drafter with weights takes
        to propose one token for each of them."""
        self._slope, self._seconds, self._yield = slope, fixed + slope * sequences, float(sequences)
        self._proposal = proposal
        self.least_acceptance = self._least()
        """Acceptance rate above which a draft token is worth its time; 1 while the cost of a step is unknown."""

    def _least(self) -> float:
        return self._slope * self._yield / self._seconds if self._seconds else 1.0

    def length(self, acceptance: float, limit: int) -> int:
        """Return how many tokens to draft for one sequence."""
        count, chance = 0, acceptance
        seconds, tokens = self._seconds, self._yield
        while count < limit and chance * seconds > self._slope * tokens:
            seconds, tokens = seconds + self._slope, tokens + chance
            chance *= acceptance
            count += 1
        return count

    def num_proposals(self, sequences: list[tuple[SequenceDrafts, int]], limit: int) -> int:
        """Return how many tokens a drafter with weights should propose per sequence. sequences: drafts and length of
        each.

        If the result is 0 because of the sequences' acceptance rates, and not because of the load, these sequences
        pause.
        """
        acceptances = [drafts.acceptance(length) for drafts, length in sequences]
        count = self.proposals(acceptances, limit)
        if not count and self.proposals([OPTIMISM] * len(sequences), 1):
            for (drafts, length), acceptance in zip(sequences, acceptances, strict=True):
                if acceptance:
                    drafts.pause(length)
        return count

    def proposals(self, acceptances: list[float], limit: int) -> int:
        """Return how many tokens a drafter with weights should propose per sequence. A token is proposed for all
        sequences and takes time for each; the next step verifies it only for sequences where it is likely enough."""
        seconds, tokens = self._seconds, self._yield
        for count in range(limit):
            chances = [chance for a in acceptances if (chance := a ** (count + 1)) * seconds > self._slope * tokens]
            more = self._proposal + self._slope * len(chances)
            if sum(chances) * seconds <= more * tokens:
                return count
            seconds, tokens = seconds + more, tokens + sum(chances)
        return limit

    def add(self, acceptance: float, count: int) -> None:
        """Add the drafts of a sequence to the step."""
        self._seconds += self._slope * count
        self._yield += sum(acceptance**j for j in range(1, count + 1))
        self.least_acceptance = self._least()
