"""Writes the prompt of a reranker that reads a query and a document as a conversation. A generative one says by yes or
no whether they fit."""

from __future__ import annotations

import re

from engine.text.chat_tokenizer import ChatTokenizer

# Qwen3-Reranker, arXiv:2506.05176; its card on the Hub has the same text
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


# `message.role == "query"`, or `selectattr("role", "eq", "query")`
IS = r"""\brole["'\]]*\s*(==|,\s*["'](eq|equalto|==)["']\s*,)\s*["']"""
ROLES = [re.compile(rf"""{IS}{role}["']""") for role in ("query", "document")]


def names_roles(chat_template: str | None) -> bool:
    """Return whether a chat template tells queries and documents apart by their roles."""
    return chat_template is not None and all(role.search(chat_template) for role in ROLES)


def score_prompt(
    tokenizer: ChatTokenizer, query: str, document: str, instruction: str | None = None, *, has_template: bool
) -> tuple[str, str]:
    """Return the prompt, and its part after the document.

    has_template: whether the model's chat template knows the roles `query` and `document`, which sentence-transformers
    uses. Raises RequestError if the template fails on them.
    """
    if not has_template:
        instruction = INSTRUCTION if instruction is None else instruction
        body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        return BEFORE + body + AFTER, AFTER
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    prompt = tokenizer.render_chat_template(messages)
    return prompt, prompt.rpartition(document)[2] if document else ""
