"""Questions for Pocket, and its own answers to them, from which an adapter learns."""

import random

from engine import LLM, SamplingParams
from tools.pocket.dictionary import ANY_WORDINGS, KIND_WORDINGS, OPPOSITE_WORDINGS, WORDINGS, Entry, word_question
from tools.pocket.small_talk import COUNTRIES, OFF_TOPIC_WORDINGS, SMALL_TALK, SYSTEM_PROMPTS

MAX_TOKENS = 80


class Answers:
    """Pocket's greedy answers, as rows of token ids with the length of the prompt."""

    def __init__(self, threads: int):
        self.llm = LLM("pocket", num_threads=threads, max_num_seqs=64, max_model_len=512)

    def ask(self, chats: list[list[dict[str, str]]]) -> list[tuple[list[int], int, str]]:
        """Token ids of each conversation, how many of them are its prompt, and the text of the answer."""
        outputs = self.llm.chat(chats, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        rows = [(output, output.outputs[0]) for output in outputs]
        return [([*o.prompt_token_ids, *a.token_ids], len(o.prompt_token_ids), a.text) for o, a in rows]


def chat(question: str, rng: random.Random) -> list[dict[str, str]]:
    system = rng.choice(SYSTEM_PROMPTS.split("|")) if rng.random() < 0.2 else None
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": question}]


def questions(words: list[str], per_word: int, rng: random.Random) -> list[str]:
    """Wordings of everything that Pocket is asked, in about the shares in which it was trained on them."""
    found = []
    for word in words:
        entry = Entry(word, rng.choice("nnva"), "", countable=True)
        for i in range(per_word):
            found.append(word_question(entry, ANY_WORDINGS if i % 2 else WORDINGS[entry.pos], rng))
        if rng.random() < 0.3:
            found.append(word_question(entry, rng.choice([KIND_WORDINGS, OPPOSITE_WORDINGS]), rng))
        if rng.random() < 0.1:
            letters = word[:-1] + rng.choice("bcdfgklmnprtvaeiou")
            found.append(word_question(Entry(letters, "n", ""), ANY_WORDINGS, rng))
        if rng.random() < 0.1:
            wording, country = rng.choice(OFF_TOPIC_WORDINGS.split("|")), rng.choice(COUNTRIES.split("|"))
            found.append(wording.format(w=word, n=rng.randrange(100), m=rng.randrange(100), c=country))
    found += [question for some in SMALL_TALK.values() for question in some.split("|")] * 3
    rng.shuffle(found)
    return found
