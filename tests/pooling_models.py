"""Tiny embedding models and rerankers with random weights, as sentence-transformers keeps them in a folder, and what
transformers computes with them. Ratios of sizes are those of published models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.models import COMMON, GEMMA3_ROPE, make_tokenizer, randomise

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "a", "cache", "keeps", "what", "was", "##s"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A cache",
    "what was",
    "fox",
    "A cache keeps what was computed, so that the next request need not compute it again. " * 2,
]
ENCODER = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 66}
BERT = {**ENCODER, "intermediate_size": 192, "type_vocab_size": 2}
ROBERTA = {**ENCODER, "intermediate_size": 192, "type_vocab_size": 1, "pad_token_id": 1}
MODERNBERT = {
    **ENCODER,
    "intermediate_size": 72,
    "local_attention": 8,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
QWEN3 = {**COMMON, "tie_word_embeddings": True}
EMBEDDING_GEMMA = {
    **COMMON,
    "tie_word_embeddings": True,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": GEMMA3_ROPE,
    "use_bidirectional_attention": True,
}
EMBEDDING_GEMMA_2 = {
    **COMMON,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 16,
    "embedding_dim": 56,
}


@dataclass(frozen=True)
class Kind:
    """What a folder holds."""

    model: str
    """transformers' class."""
    config: str
    fields: dict[str, Any]
    tokenizer: str
    pooling: str | None = None
    """sentence-transformers' mode; None for no modules.json."""
    normalize: bool = True
    dense: tuple[int, ...] = ()
    """Outputs of the dense layers behind the pooling."""
    in_text_config: bool = False
    """Whether the fields are those of the text part of a multimodal model, which here has no other."""


EMBEDDINGS = {
    "minilm": Kind("BertModel", "BertConfig", BERT, "wordpiece", "mean"),
    "bge": Kind("BertModel", "BertConfig", BERT, "wordpiece", "cls"),
    "e5_multilingual": Kind("XLMRobertaModel", "XLMRobertaConfig", ROBERTA, "unigram", "mean"),
    "distilroberta": Kind("RobertaModel", "RobertaConfig", ROBERTA, "bpe", "mean", normalize=False),
    "gte_modernbert": Kind("ModernBertModel", "ModernBertConfig", MODERNBERT, "bpe", "cls", normalize=False),
    "qwen3_embedding": Kind("Qwen3Model", "Qwen3Config", QWEN3, "bpe", "lasttoken"),
    "e5_mistral": Kind("MistralModel", "MistralConfig", {**COMMON, "sliding_window": 8}, "bpe", "mean"),
    "embedding_gemma_2": Kind(
        "EmbeddingGemma2TextModel", "EmbeddingGemma2TextConfig", EMBEDDING_GEMMA_2, "bpe", "mean"
    ),
    "embedding_gemma_2_whole": Kind(
        "EmbeddingGemma2Model", "EmbeddingGemma2Config", EMBEDDING_GEMMA_2, "bpe", "mean", in_text_config=True
    ),
    "embedding_gemma": Kind("Gemma3TextModel", "Gemma3TextConfig", EMBEDDING_GEMMA, "bpe", "mean", dense=(96, 48)),
}
ONE = {"num_labels": 1}
THREE = {"id2label": {0: "sad", 1: "glad", 2: "neither"}, "label2id": {"sad": 0, "glad": 1, "neither": 2}}
RERANKERS = {
    "ms_marco_minilm": Kind("BertForSequenceClassification", "BertConfig", BERT | ONE, "wordpiece"),
    "bge_reranker": Kind("XLMRobertaForSequenceClassification", "XLMRobertaConfig", ROBERTA | ONE, "unigram"),
    "gte_reranker_modernbert": Kind(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        MODERNBERT | ONE | {"classifier_pooling": "mean"},
        "bpe",
    ),
    "qwen3_reranker_seq_cls": Kind("Qwen3ForSequenceClassification", "Qwen3Config", QWEN3 | ONE, "bpe"),
}
CLASSIFIERS = {
    "bert_emotion": Kind("BertForSequenceClassification", "BertConfig", BERT | THREE, "wordpiece"),
    "toxic_roberta": Kind(
        "RobertaForSequenceClassification",
        "RobertaConfig",
        ROBERTA | THREE | {"problem_type": "multi_label_classification"},
        "bpe",
    ),
    "modernbert_topics": Kind(
        "ModernBertForSequenceClassification", "ModernBertConfig", MODERNBERT | {"classifier_pooling": "cls"}, "bpe"
    ),
    "qwen3_guard": Kind("Qwen3ForSequenceClassification", "Qwen3Config", QWEN3 | THREE, "bpe"),
}
TOKEN_CLASSIFIERS = {
    "bert_ner": Kind("BertForTokenClassification", "BertConfig", BERT | THREE, "wordpiece"),
    "xlm_roberta_ner": Kind("XLMRobertaForTokenClassification", "XLMRobertaConfig", ROBERTA | THREE, "unigram"),
    "modernbert_ner": Kind("ModernBertForTokenClassification", "ModernBertConfig", MODERNBERT | THREE, "bpe"),
    "qwen3_prm": Kind("Qwen3ForTokenClassification", "Qwen3Config", QWEN3 | THREE, "bpe"),
}
KINDS = EMBEDDINGS | RERANKERS | CLASSIFIERS | TOKEN_CLASSIFIERS


def make(folder: Path, kind: Kind) -> Path:
    """Write a model of this kind into `folder` and return it."""
    tokenizer = TOKENIZERS[kind.tokenizer]()
    tokenizer.save_pretrained(folder)
    fields = {**kind.fields, "vocab_size": len(tokenizer)}
    config = getattr(transformers, kind.config)(**({"text_config": fields} if kind.in_text_config else fields))
    model = getattr(transformers, kind.model)(config).eval()
    randomise(model, tied=bool(getattr(config, "tie_word_embeddings", True)), seed=0)
    model.save_pretrained(folder)
    if kind.pooling is not None:
        write_modules(folder, kind)
    return folder


def poison(folder: Path, word: str = "fox") -> None:
    """Make the embedding of a word of a BERT model infinite, and so that of each text that has it."""
    file = folder / "model.safetensors"
    tensors, tokenizer = load_file(file), Tokenizer.from_file(str(folder / "tokenizer.json"))
    tensors["embeddings.word_embeddings.weight"][tokenizer.token_to_id(word)] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})


def write_modules(folder: Path, kind: Kind) -> None:
    size = kind.fields["hidden_size"]
    modules = ["Transformer", "Pooling", *["Dense"] * len(kind.dense), *["Normalize"] * kind.normalize]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(modules) if i)]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(modules, paths, strict=True))
    ]
    write_json(folder / "modules.json", entries)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 60, "do_lower_case": False})
    flags = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    pooling = {f"pooling_mode_{flag}": mode == kind.pooling for mode, flag in flags.items()}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": size, "include_prompt": True, **pooling})
    for path, inputs, outputs in zip(paths[2:], (size, *kind.dense), kind.dense, strict=False):
        activation = (
            "torch.nn.modules.linear.Identity" if outputs == kind.dense[-1] else "torch.nn.modules.activation.Tanh"
        )
        fields = {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": activation}
        write_json(folder / path / "config.json", fields)
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) / inputs**0.5
        save_file({"linear.weight": weight}, folder / path / "model.safetensors")


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


class Reference:
    """What sentence-transformers computes, by transformers' own model and a few lines."""

    def __init__(self, folder: Path, kind: Kind):
        self.folder, self.kind = folder, kind
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        cls = getattr(transformers, kind.model)
        self.model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def embed(self, text: str | list[int]) -> torch.Tensor:
        ids = self.tokenizer(text)["input_ids"] if isinstance(text, str) else text
        hidden = self.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        vector = {"cls": hidden[0], "lasttoken": hidden[-1], "mean": hidden.mean(0)}[self.kind.pooling or "lasttoken"]
        for i, outputs in enumerate(self.kind.dense, 2):
            weight = load(self.folder / f"{i}_Dense/model.safetensors")
            vector = weight @ vector
            vector = vector if outputs == self.kind.dense[-1] else vector.tanh()
        return F.normalize(vector, dim=0) if self.kind.normalize else vector

    @torch.inference_mode()
    def vectors(self, ids: list[int]) -> torch.Tensor:
        """Vectors of all tokens, [tokens, size]."""
        hidden = self.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return F.normalize(hidden, dim=-1) if self.kind.normalize else hidden

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of the classes of a text [classes], or of each of its tokens [tokens, classes]."""
        return self.model(input_ids=torch.tensor([ids])).logits[0]

    @torch.inference_mode()
    def score(self, query: str, document: str) -> float:
        types = self.kind.fields.get("type_vocab_size") == 2
        encoded = self.tokenizer(query, document, return_tensors="pt", return_token_type_ids=types)
        return self.model(**encoded).logits.sigmoid().item()


def load(file: Path) -> torch.Tensor:
    return load_file(file)["linear.weight"]


def wordpiece() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer like BERT's, with the padding and the truncation that sentence-transformers leaves in its files."""
    letters = [chr(i) for i in range(97, 123)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, ".", ",", *letters, *(f"##{c}" for c in letters)]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(32)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def unigram() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer like that of XLM-RoBERTa's files."""
    letters = ["▁", *(chr(i) for i in range(97, 123)), "T", "A", ".", ","]
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"▁{word}", -5.0) for word in WORDS[:-1]] + [(letter, -9.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


TOKENIZERS = {"wordpiece": wordpiece, "unigram": unigram, "bpe": make_tokenizer}
