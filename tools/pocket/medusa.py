"""Train the Medusa heads that draft for Pocket, on its own answers: questions -> answers -> hidden states -> heads.

    python -m tools.pocket.medusa --out pocket_medusa --minutes 10

Pocket itself does not change, and WordNet is not needed: the words are those of words.py and, again and again, those
of the answers, as far as Pocket knows them.
"""

import argparse
import logging
import random
import re

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.pocket import PATH
from tools.medusa.heads import add_options, hidden_states, train_heads
from tools.pocket.dictionary import ANY_WORDINGS, KIND_WORDINGS, OPPOSITE_WORDINGS, WORDINGS, Entry, word_question
from tools.pocket.small_talk import COUNTRIES, OFF_TOPIC_WORDINGS, SMALL_TALK, SYSTEM_PROMPTS, UNKNOWN
from tools.pocket.words import EVERYDAY

logger = logging.getLogger(__name__)

REFUSAL = UNKNOWN.partition("{")[0]
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


def known_words(answers: Answers) -> list[str]:
    """Return the words that Pocket explains, found in its explanations of others."""
    known: list[str] = []
    seen, asked = set(EVERYDAY), list(EVERYDAY)
    while asked:
        texts = [text for _, _, text in answers.ask([[{"role": "user", "content": f"Define {w}."}] for w in asked])]
        found = [(word, text) for word, text in zip(asked, texts, strict=True) if not text.startswith(REFUSAL)]
        known += [word for word, _ in found]
        near = {word for _, text in found for word in re.findall(r"\b[a-z]{3,}\b", text)}
        near |= {word[:-1] for word in near if word.endswith("s")}
        asked = sorted(near - seen)
        seen |= near
        logger.info("%d words are known, %d more are in their explanations", len(known), len(asked))
    return known


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--per-word", type=int, default=4, help="questions for each word")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)

    def compute() -> tuple[Tensor, Tensor]:
        answers = Answers(args.threads)
        asked = questions(known_words(answers), args.per_word, rng)
        rows = [(ids, prompt) for ids, prompt, _ in answers.ask([chat(question, rng) for question in asked])]
        logger.info("%d answers, %d tokens", len(rows), sum(len(ids) - prompt for ids, prompt in rows))
        return hidden_states(model, rows, args.heads)

    train_heads(model.lm_head.weight.detach(), compute, args)


if __name__ == "__main__":
    main()
