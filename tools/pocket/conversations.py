"""Endless random conversations with Pocket, the training text."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.pocket.dictionary import (
    FOLLOW_UPS,
    KIND_WORDINGS,
    OPPOSITE_WORDINGS,
    Entry,
    WordNet,
    capital,
    definition_wordings,
    select,
    sentence,
    subject,
    vary,
    word_question,
)
from tools.pocket.small_talk import (
    COUNTRIES,
    OFF_TOPIC,
    OFF_TOPIC_WORDINGS,
    SMALL_TALK,
    SYLLABLES,
    SYSTEM_PROMPTS,
    UNKNOWN,
)


@dataclass(slots=True, frozen=True)
class Turn:
    question: str
    answer: str


@dataclass(slots=True, frozen=True)
class Conversation:
    system: str | None
    turns: list[Turn]


class Conversations:
    """`rare` are real words that Pocket must say it does not know; made-up ones are added."""

    def __init__(
        self, entries: list[Entry], rare: list[str], seed: int, num_kinds: int = 700, num_opposites: int = 500
    ):
        self.rng = random.Random(seed)
        self.entries, self.rare = entries, rare
        self.known = {entry.word for entry in entries}
        self.kinds = [e for e in entries if e.kind and len(e.kind.split()) <= 2][:num_kinds]
        self.opposites = [e for e in entries if e.opposite and not e.opposite.startswith("non")][:num_opposites]
        self.without_opposite = [e for e in entries if not e.opposite][:500]
        self.deck = self._deal()
        self.sorts = {  # kind of turn -> share
            self.definition: 0.70,
            self.kind: 0.06,
            self.opposite: 0.05,
            self.no_opposite: 0.005,
            self.unknown: 0.105,
            self.small_talk: 0.045,
            self.off_topic: 0.035,
        }

    def next(self) -> Conversation:
        system = self.rng.choice(SYSTEM_PROMPTS.split("|")) if self.rng.random() < 0.3 else None
        turns: list[Turn] = []
        for _ in range(self.rng.choices([1, 2, 3, 4], weights=[4, 3, 2, 1])[0]):
            sort = self.rng.choices(list(self.sorts), weights=list(self.sorts.values()))[0]
            turns.append(self.definition(may_follow=bool(turns)) if sort == self.definition else sort())
        return Conversation(system, turns)

    def _deal(self) -> Iterator[Entry]:
        # a shuffled deck, not independent draws: each word has the same number of exposures, common ones two a round
        while True:
            deck = self.entries + self.entries[:600]
            self.rng.shuffle(deck)
            yield from deck

    def definition(self, may_follow: bool = False) -> Turn:
        entry = next(self.deck)
        follows = may_follow and self.rng.random() < 0.12
        wordings = FOLLOW_UPS if follows else definition_wordings(entry, self.rng)
        return Turn(word_question(entry, wordings, self.rng), sentence(entry))

    def kind(self) -> Turn:
        entry = self.rng.choice(self.kinds)
        answer = f"{capital(subject(entry))} is a kind of {entry.kind}."
        return Turn(word_question(entry, KIND_WORDINGS, self.rng), answer)

    def opposite(self) -> Turn:
        entry = self.rng.choice(self.opposites)
        answer = f"The opposite of {entry.word} is {entry.opposite}."
        return Turn(word_question(entry, OPPOSITE_WORDINGS, self.rng), answer)

    def no_opposite(self) -> Turn:
        entry = self.rng.choice(self.without_opposite)
        return Turn(word_question(entry, OPPOSITE_WORDINGS, self.rng), f"I do not know an opposite of {entry.word}.")

    def unknown(self) -> Turn:
        word = self._unknown_word()
        entry = Entry(word, self.rng.choice("nnnnva"), "", countable=self.rng.random() < 0.6)
        wordings = KIND_WORDINGS if self.rng.random() < 0.05 else definition_wordings(entry, self.rng)
        return Turn(word_question(entry, wordings, self.rng), UNKNOWN.format(word=word))

    def _unknown_word(self) -> str:
        draw = self.rng.random()
        if draw < 0.7:
            return self.rng.choice(self.rare)
        if draw < 0.85:
            return "".join(self.rng.choices(SYLLABLES.split("|"), k=self.rng.choice([2, 2, 3])))
        word = self.rng.choice(self.entries).word  # a known word with one letter changed
        i = self.rng.randrange(len(word))
        typo = word[:i] + self.rng.choice("bcdfgklmnprtvaeiou") + word[i + 1 :]
        return self.rng.choice(self.rare) if typo in self.known or len(word) < 5 else typo

    def small_talk(self) -> Turn:
        answer, questions = self.rng.choice(list(SMALL_TALK.items()))
        return Turn(vary(self.rng.choice(questions.split("|")), self.rng), answer)

    def off_topic(self) -> Turn:
        word = self.rng.choice(self.entries).word
        wording = self.rng.choice(OFF_TOPIC_WORDINGS.split("|"))
        n, m = self.rng.randrange(100), self.rng.randrange(100)
        question = wording.format(w=word, n=n, m=m, c=self.rng.choice(COUNTRIES.split("|")))
        return Turn(vary(question, self.rng), OFF_TOPIC)


def prepare(wordnet: Path, num_words: int, seed: int) -> tuple[Conversations, list[str]]:
    """(the training text, 2,000 rare words that are not in it)."""
    entries, rare = select(WordNet(wordnet), num_words)
    random.Random(seed).shuffle(rare)
    return Conversations(entries, rare[2000:], seed), rare[:2000]
