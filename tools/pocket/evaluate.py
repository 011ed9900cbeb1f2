"""How much of the dictionary a trained folder knows: greedy answers against the sentences it was trained on."""

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.pocket import PATH
from tools.pocket.conversations import Conversations, prepare
from tools.pocket.dictionary import ANY_WORDINGS, Entry, definition_wordings, sentence, word_question
from tools.pocket.small_talk import UNKNOWN


class Pocket:
    """Greedy answers of a model folder, in float32."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    @torch.inference_mode()
    def answer(self, questions: list[str], system: str | None = None) -> list[str]:
        """One answer for each question, each asked in a new conversation."""
        head = [{"role": "system", "content": system}] if system else []
        chats = [[*head, {"role": "user", "content": question}] for question in questions]
        texts = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        output = self.model.generate(**inputs, max_new_tokens=60, do_sample=False)
        return self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def overlap(answer: str, truth: str) -> float:
    """Return the fraction of the words of `truth` that `answer` has."""
    words, given = truth.lower().rstrip(".").split(), answer.lower().rstrip(".").split()
    return sum(word in given for word in words) / len(words)


def gloss_of(text: str) -> str:
    """What follows `is` or `means`: the part that has to be known, not copied from the question."""
    return text.partition(" is ")[2] or text.partition(" means ")[2] or text


def share(hits: list[bool]) -> float:
    return round(sum(hits) / len(hits), 3)


def evaluate(
    folder: Path, conversations: Conversations, held_out: list[str], seed: int, num_words: int = 300
) -> dict[str, float]:
    """Shares of trained words answered exactly and recognisably (>= 60 % of the gloss's words), of kinds and
    opposites answered exactly, and of words held out from training that the model says it does not know."""
    rng, pocket, entries = random.Random(seed), Pocket(folder), conversations.entries
    report: dict[str, float] = {}
    for name, pool, system in (
        ("any", entries, None),
        ("everyday", [entry for entry in entries if entry.everyday], None),
        ("system_prompt", entries, "You are a helpful assistant."),
    ):
        chosen = rng.sample(pool, min(num_words, len(pool)))
        given = pocket.answer([word_question(e, definition_wordings(e, rng), rng) for e in chosen], system)
        pairs = [(answer, sentence(entry)) for answer, entry in zip(given, chosen, strict=True)]
        report[f"{name}_exact"] = share([a == b for a, b in pairs])
        report[f"{name}_overlap_60"] = share([overlap(gloss_of(a), gloss_of(b)) >= 0.6 for a, b in pairs])
    words = rng.sample(held_out, num_words)
    given = pocket.answer([word_question(Entry(word, "n", ""), ANY_WORDINGS, rng) for word in words])
    report["held_out_refused"] = share([a.startswith("I do not know the word") for a in given])
    report["held_out_spelt_right"] = share([a == UNKNOWN.format(word=w) for a, w in zip(given, words, strict=True)])
    for name, deal in (("kind", conversations.kind), ("opposite", conversations.opposite)):
        turns = [deal() for _ in range(num_words)]
        given = pocket.answer([turn.question for turn in turns])
        report[f"{name}_exact"] = share([a == turn.answer for a, turn in zip(given, turns, strict=True)])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wordnet", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=PATH)
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0, help="of the training run: it decides which words were held out")
    args = parser.parse_args()
    conversations, held_out = prepare(args.wordnet, args.words, args.seed)
    for name, value in evaluate(args.model, conversations, held_out, args.seed).items():
        print(f"{name:24} {value:.3f}")


if __name__ == "__main__":
    main()
