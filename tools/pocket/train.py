"""Train Pocket from scratch on a CPU: WordNet -> tokenizer -> model folder -> evaluation.

    python -m tools.pocket.train --wordnet /usr/share/wordnet --out pocket --minutes 35

Hidden matrices learn with Muon (https://kellerjordan.github.io/posts/muon/), the rest with AdamW.
The schedule is a function of the wall clock, so a run always ends annealed, however busy the machine is.
"""

import argparse
import json
import logging
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tools.pocket.conversations import Conversation, Conversations, prepare
from tools.pocket.dictionary import sentence
from tools.pocket.evaluate import evaluate

logger = logging.getLogger(__name__)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
PAD, IM_START, IM_END = range(3)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 4096
IGNORE = -100  # a label without loss


def train_tokenizer(conversations: Conversations) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose text is every definition, many conversations and a sample of rare words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [sentence(entry) for entry in conversations.entries for _ in range(2)]
    texts += [f" {word}" for word in conversations.rare[:15000]]
    texts += [turn.question + "\n" + turn.answer for _ in range(15000) for turn in conversations.next().turns]
    texts += ["system\nuser\nassistant\n"] * 5000
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[IM_END],
        bos_token=SPECIALS[PAD],
        pad_token=SPECIALS[PAD],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def new_model(hidden: int, layers: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,  # so that tensor parallel 2 and 4 divide it
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=PAD,
        eos_token_id=IM_END,
        pad_token_id=PAD,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


class RowPacker:
    """Whole conversations packed into rows of fixed length; a row always starts with the start of one."""

    def __init__(self, conversations: Conversations, tokenizer: PreTrainedTokenizerFast, row_tokens: int):
        self.conversations, self.row_tokens = conversations, row_tokens
        self.encode = tokenizer.backend_tokenizer.encode_batch
        self.open: list[tuple[list[int], list[int]]] = []
        self.turns = 0  # questions dealt so far

    def _tokens(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """(ids, labels): labels are the ids of the assistant's tokens and IGNORE elsewhere."""
        before = f"<|im_start|>system\n{conversation.system}<|im_end|>\n" if conversation.system else ""
        pieces: list[str] = []
        for turn in conversation.turns:
            pieces.append(f"{before}<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n")
            pieces.append(f"{turn.answer}<|im_end|>")
            before = "\n"
        ids: list[int] = []
        labels: list[int] = []
        for i, encoding in enumerate(self.encode(pieces)):
            ids += encoding.ids
            labels += encoding.ids if i % 2 else [IGNORE] * len(encoding.ids)
        self.turns += len(conversation.turns)
        return [*ids, *self.encode(["\n"])[0].ids], [*labels, IGNORE]

    def _row(self) -> tuple[list[int], list[int]]:
        while True:
            ids, labels = self._tokens(self.conversations.next())
            for row in self.open:  # first fit
                if len(row[0]) + len(ids) <= self.row_tokens:
                    row[0].extend(ids)
                    row[1].extend(labels)
                    break
            else:
                self.open.append((ids, labels))
            if len(self.open) > 16:
                ids, labels = self.open.pop(max(range(16), key=lambda i: len(self.open[i][0])))
                missing = self.row_tokens - len(ids)
                return ids + [PAD] * missing, labels + [IGNORE] * missing

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """ids and labels, [rows, row_tokens] each."""
        ids, labels = zip(*(self._row() for _ in range(rows)), strict=True)
        return torch.tensor(ids), torch.tensor(labels)


def rate(progress: float) -> float:
    """Share of the peak learning rate: short warm-up, plateau, then a straight line to zero."""
    return min(1.0, progress / 0.02, max(0.0, 1 - progress) / 0.6)


def train(model: Qwen3ForCausalLM, packer: RowPacker, args: argparse.Namespace) -> dict[str, float]:
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(hidden, lr=args.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    body = torch.compile(model.model) if args.compile else model.model
    start = saved = time.monotonic()
    step = tokens = 0
    mean_loss = 10.0
    while (progress := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        for optimizer, peak in ((muon, args.muon_lr), (adam, args.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate(progress)
        ids, labels = packer.batch(args.rows)
        with torch.autocast("cpu", torch.bfloat16):
            states = body(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            wanted = labels[:, 1:] != IGNORE  # the output layer is a quarter of the work: only where there is loss
            logits = model.lm_head(states[wanted])
        loss = F.cross_entropy(logits.float(), labels[:, 1:][wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        mean_loss += (loss.item() - mean_loss) * max(0.02, 1 / step)
        elapsed = time.monotonic() - start
        if step % 50 == 0 or step == 5:
            state = (100 * progress, step, mean_loss, tokens, packer.turns, tokens / elapsed)
            logger.info("%5.1f %% step=%d loss=%.4f tokens=%d turns=%d tok_s=%.0f", *state)
        if args.checkpoints and time.monotonic() - saved > 300:
            saved = time.monotonic()
            model.save_pretrained(args.checkpoints / "latest")
    elapsed = time.monotonic() - start
    return {"steps": step, "tokens": tokens, "turns": packer.turns, "seconds": elapsed, "loss": mean_loss}


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.to(torch.bfloat16)
    model.generation_config.update(
        do_sample=True, temperature=0.3, eos_token_id=[IM_END, PAD], pad_token_id=PAD, bos_token_id=PAD
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written for its owner only; a package is installed for all
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, required=True, help="folder with data.noun, cntlist.rev ...")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=35)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--muon-lr", type=float, default=6e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, help="folder for a copy every 5 minutes")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    conversations, held_out = prepare(args.wordnet, args.words, args.seed)
    tokenizer = train_tokenizer(conversations)
    model = new_model(args.hidden, args.layers)
    if args.checkpoints:
        tokenizer.save_pretrained(args.checkpoints / "latest")
    logger.info("entries=%d parameters=%d", len(conversations.entries), model.num_parameters())
    report = train(model, RowPacker(conversations, tokenizer, args.row_tokens), args)
    shutil.rmtree(args.out, ignore_errors=True)
    save(model, tokenizer, args.out)
    report |= evaluate(args.out, conversations, held_out, args.seed)
    logger.info("report %s", json.dumps(report))


if __name__ == "__main__":
    main()
