"""Fields of OpenAI's and vLLM's requests that no route here has."""

from __future__ import annotations

from deployments.http.validation import ForeignFields

FOREIGN_FIELDS = ForeignFields(
    unused={"metadata": "nothing is stored", "prompt_cache_key": "prefixes are cached by content, whatever the key"},
    ignored={
        "best_of": "the first `n` answers are returned",
        "guided_decoding_backend": "there is one",
        "guided_whitespace_pattern": "JSON is written compactly",
        "kv_transfer_params": "the server decides where a prompt is computed",
        "length_penalty": "it is for beam search",
        "media_io_kwargs": "there are only texts",
        "mm_processor_kwargs": "there are only texts",
        "moderation": "nothing is moderated",
        "prediction": "it would make the answer faster, not different",
        "prompt_cache_options": "prefixes are cached as long as there is room",
        "prompt_cache_retention": "prefixes are cached as long as there is room",
        "repetition_detection": "an answer ends at its end or at `max_tokens`",
        "spaces_between_special_tokens": "tokens are joined as they are",
        "store": "nothing is stored",
        "thinking_token_budget": "only chats know where reasoning ends",
        "verbosity": "the model is not told",
        "vllm_xargs": "they are for plugins of vLLM's",
        "watermarking": "answers have no watermark",
        "web_search_options": "nothing is searched",
    },
    refused={
        "audio": "answers are text",
        "chat_template": "the template in the model's folder is used",
        "documents": "put them into the messages",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "logits_processors": "no code of a request is run",
        "modalities": "answers are text",
        "prompt_embeds": "prompts are text or token ids",
        "return_tokens_as_token_ids": "use return_token_ids of completions",
        "suffix": "text is only added at the end",
        "truncate_prompt_tokens": "a prompt is taken whole or not at all",
        "truncation_side": "a prompt is taken whole or not at all",
        "use_beam_search": "answers are sampled",
        # of completions here, and of vLLM's chat too
        "add_special_tokens": "the chat template brings them",
        "echo": "only completions have it",
        "prompt_logprobs": "only completions have it",
        "return_token_ids": "only completions have it",
    },
    neutral={
        "best_of": [1],
        "function_call": ["none", "auto"],
        "functions": [[]],
        "modalities": [["text"]],
        "length_penalty": [1, 1.0],
        "prompt_cache_retention": ["in_memory"],
        "spaces_between_special_tokens": [True],
        "suffix": [""],
        "verbosity": ["medium"],
    },
)
