"""WordNet files -> dictionary entries -> questions and their answers.

File formats: wndb(5WN) and senseidx(5WN), https://wordnet.princeton.edu/documentation
"""

import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from tools.pocket.words import (
    COUNT_WORDS,
    DETERMINERS,
    EVERYDAY,
    MASS_WORDS,
    NOT_HEADWORDS,
    NOT_NOUNS_FIRST,
    SENSE,
    UNIQUE,
)

POS_FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
SENSE_TYPES = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}  # 5: an adjective grouped under another

ANIMAL_FILE = 5
MASS_FILES = {7, 12, 13, 16, 19, 22, 26, 27}  # attribute, feeling, food, motive, phenomenon, process, state, substance
MASS_ENDING = re.compile(r"(ing|ness|ity|ism|ance|ence|ship|hood|ics|ology|graphy|cracy|dom|ware)$")
ABSTRACT = re.compile(r"(the|an?) (\w+ )?(act|action|activity|process|state|quality|condition|possibility|practice)\b")
VOWEL_SOUND = re.compile(r"(?!uni([^nm]|$)|use|usu|uti|eu|ewe|one|once|ubi|ura)[aeiou]|hour|hono|hones|heir|x-", re.I)
CLAUSE = re.compile(r" (?:that|which|who|because|so that|such as|especially|usually) ")
STRANDED = re.compile(r" (in|of|to|for|with|on|at|by)$")


@dataclass(slots=True, frozen=True)
class Entry:
    word: str
    pos: str  # n, v, a or r
    gloss: str
    countable: bool = False
    kind: str | None = None  # the hypernym: a dog is a kind of canine
    opposite: str | None = None
    everyday: bool = False


def article(word: str) -> str:
    """`an` before a vowel sound, else `a`."""
    return "an" if VOWEL_SOUND.match(word) else "a"


def plural(noun: str) -> str:
    if re.search(r"(s|x|z|ch|sh)$", noun):
        return noun + "es"
    return noun[:-1] + "ies" if re.search(r"[^aeiou]y$", noun) else noun + "s"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def trim_gloss(gloss: str, max_words: int = 18) -> str | None:
    """The first clause of a gloss without examples and parentheses, or None if no short clause is there."""
    text = re.sub(r"\([^()]*\)", " ", gloss.split('; "')[0].split(': "')[0])
    text = re.sub(r"\s+([,;:.])", r"\1", re.sub(r"\s+", " ", text)).strip(" ,;:.")
    text = re.split(r"[;:]| -- |\"", text)[0].replace("`", "'").strip(" ,;:.").removeprefix("to ")
    while len(text.split()) > max_words and "," in text:
        text = text.rsplit(",", 1)[0]
    if len(text.split()) > max_words:
        text = CLAUSE.split(text)[0]
        text = text if len(text.split()) >= 5 and not STRANDED.search(text) else ""
    return text if 2 <= len(text.split()) <= max_words or re.fullmatch(r"\w{4,}", text) else None


def is_countable(noun: str, lexicographer_file: int) -> bool:
    """Whether `a <noun>` reads well; WordNet does not say, so guess by its file, its ending and two lists."""
    if noun in COUNT_WORDS:
        return True
    return not (noun in MASS_WORDS or lexicographer_file in MASS_FILES or MASS_ENDING.search(noun))


class WordNet:
    """The parts of WordNet we read: senses in order of frequency, and how often each word was tagged."""

    def __init__(self, folder: Path):
        self.synsets: dict[tuple[str, str], str] = {}  # (pos, offset) -> its line in data.<pos>
        self.senses: dict[tuple[str, str], list[str]] = {}  # (word, pos) -> offsets, most frequent first
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)  # word -> pos -> tag count
        for pos, name in POS_FILES.items():
            for line in (folder / f"data.{name}").read_text().splitlines():
                if not line.startswith("  "):  # the licence notice is indented
                    self.synsets[pos, line[:8]] = line
            for line in (folder / f"index.{name}").read_text().splitlines():
                fields = line.split()
                if not line.startswith("  "):
                    self.senses[fields[0], pos] = fields[-int(fields[2]) :]
        for line in (folder / "cntlist.rev").read_text().splitlines():
            key, _, count = line.split()
            word, rest = key.split("%")
            self.counts[word][SENSE_TYPES[rest[0]]] += int(count)

    def words(self, pos: str, offset: str) -> list[str]:
        fields = self.synsets[pos, offset].split(" | ")[0].split()
        return [re.sub(r"\(.*", "", word) for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]

    def pointers(self, pos: str, offset: str, symbol: str) -> list[tuple[int, str]]:
        """(number of the word it starts from or 0 for all, word it leads to) for each pointer of this kind."""
        fields = self.synsets[pos, offset].split(" | ")[0].split()
        start = 4 + 2 * int(fields[3], 16)
        found = []
        for i in range(start + 1, start + 1 + 4 * int(fields[start]), 4):
            if fields[i] == symbol:
                target_word = max(int(fields[i + 3][2:], 16), 1) - 1
                target = self.words(fields[i + 2].replace("s", "a"), fields[i + 1])[target_word]
                found.append((int(fields[i + 3][:2], 16), target.replace("_", " ")))
        return found

    def opposite(self, word: str, pos: str) -> str | None:
        for offset in self.senses[word, pos][:2]:
            for source, target in self.pointers(pos, offset, "!"):
                if self.words(pos, offset)[source - 1].lower() == word and " " not in target:
                    return target
        return None

    def sense(self, word: str, pos: str) -> str | None:
        """The most tagged sense. Where none was tagged their order is chance: the animal, the only one, or None."""
        offsets = self.senses[word, pos]
        if self.counts[word][pos] or word in SENSE or len(offsets) == 1:
            return offsets[SENSE.get(word, 0)]
        return next((o for o in offsets if int(self.synsets[pos, o].split()[1]) == ANIMAL_FILE), None)

    def entry(self, word: str, everyday: bool = False) -> Entry | None:
        """The word's most frequent sense, or None if it has no short and telling gloss or is a name."""
        known = [pos for pos in POS_FILES if (word, pos) in self.senses]
        if not known:
            return None
        noun_first = everyday and word not in NOT_NOUNS_FIRST
        pos = max(known, key=lambda p: (p == "n" and noun_first, self.counts[word][p], p == "n"))
        offset = self.sense(word, pos)
        if offset is None:
            return None
        line = self.synsets[pos, offset]
        gloss = trim_gloss(line.split(" | ", 1)[1], max_words=26 if everyday else 18)
        is_name = word not in self.words(pos, offset) or self.pointers(pos, offset, "@i")
        if gloss is None or (is_name and word not in UNIQUE) or "ethnic slur" in line:
            return None
        says_nothing = re.search(rf"\b{word[:-1]}|^used |^([sS]ee|relating to|act)\b", gloss)  # `sleep: be asleep`
        is_bare = pos == "n" and (" " not in gloss or re.search(r"[^aious]s$", word))  # one word, or a plural
        if (says_nothing or is_bare) and not everyday:
            return None
        countable = pos == "n" and is_countable(word, int(line.split()[1])) and not ABSTRACT.match(gloss)
        first = gloss.split()[0].lower()
        if countable and first not in DETERMINERS and not first.endswith("s"):
            gloss = f"{'the' if first.endswith('est') else article(gloss)} {gloss}"
        kinds = [target for _, target in self.pointers(pos, offset, "@")] if pos == "n" else []
        return Entry(word, pos, gloss, countable, kinds[0] if kinds else None, self.opposite(word, pos), everyday)


def select(wordnet: WordNet, size: int) -> tuple[list[Entry], list[str]]:
    """(`size` entries, everyday words first and then by tag count; the rarer single words left over)."""
    lemmas = {word for word, _ in wordnet.senses if re.fullmatch(r"[a-z]{3,}", word)} - NOT_HEADWORDS
    by_count = sorted(lemmas, key=lambda word: (-wordnet.counts[word].total(), word))
    entries: dict[str, Entry] = {}
    for word in [*EVERYDAY, *by_count]:
        if len(entries) < size and word not in entries and (entry := wordnet.entry(word, word in EVERYDAY)):
            entries[word] = entry
    rare = [word for word in by_count if word not in entries and wordnet.counts[word].total() <= 2]
    return list(entries.values()), rare


def subject(entry: Entry) -> str:
    """The word as it stands in a sentence: `an apple`, `music`, `the sun`, `swim`."""
    if entry.word in UNIQUE:
        return f"the {entry.word}"
    return f"{article(entry.word)} {entry.word}" if entry.countable else entry.word


def sentence(entry: Entry) -> str:
    """The answer: one English sentence."""
    if entry.pos == "v":
        return f"To {entry.word} is to {entry.gloss}."
    if entry.pos == "n":
        return f"{capital(subject(entry))} is {entry.gloss}."
    return f"{entry.word.capitalize()} means {entry.gloss}."


# {w}: the word, {a}: with its article, {s}: plural; repeated where people use it most
ANY_WORDINGS = (
    "What does {w} mean?|Define {w}.|What is {w}?|What is the meaning of {w}?|What does the word {w} mean?|{w}|{w}?|"
    "Tell me about {w}.|Explain {w}.|Meaning of {w}|Definition of {w}|Do you know the word {w}?|Can you define {w}?|"
    "Please define {w}.|what is {w}|define {w}|Can you tell me what {w} means?|What's {w}?"
)
WORDINGS = {
    "n": "What is {a}?|What is {a}?|What is {a}?|What's {a}?|Tell me what {a} is.|Can you explain what {a} is?|"
    "Tell me about the {w}.|Describe {a}.|What are {s}?|Tell me about {s}.|Do you know what {a} is?|Define {a}.",
    "v": "What does it mean to {w}?|What does it mean to {w}?|What does to {w} mean?|What is it to {w}?|Define to {w}.",
    "a": "What does it mean to be {w}?|What does {w} mean?|What is something {w}?|Describe {w}.",
    "r": "What does {w} mean?|What does it mean to do something {w}?",
}
FOLLOW_UPS = "And {a}?|What about {a}?|And {w}?|How about {w}?|{w}?|What about {w}?"
KIND_WORDINGS = (
    "What kind of thing is {a}?|What kind of thing is {a}?|What sort of thing is {a}?|What type of thing is {a}?"
)
OPPOSITE_WORDINGS = (
    "What is the opposite of {w}?|What is the opposite of {w}?|What's the opposite of {w}?|Opposite of {w}|"
    "Tell me the opposite of {w}.|What is an antonym of {w}?|Do you know the opposite of {w}?"
)


def definition_wordings(entry: Entry, rng: random.Random) -> str:
    fits = entry.pos != "n" or entry.countable or entry.word in UNIQUE
    return WORDINGS[entry.pos] if fits and rng.random() < 0.5 else ANY_WORDINGS


def word_question(entry: Entry, wordings: str, rng: random.Random) -> str:
    text = rng.choice(wordings.split("|")).format(w=entry.word, a=subject(entry), s=plural(entry.word))
    return vary(text, rng)


def vary(text: str, rng: random.Random) -> str:
    """As people type it: sometimes without capitals or the final mark."""
    if rng.random() < 0.25:
        text = text.rstrip("?.!")
    draw = rng.random()
    return text.lower() if draw < 0.25 else capital(text) if draw < 0.9 else text
