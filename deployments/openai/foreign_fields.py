"""Fields of OpenAI's and vLLM's requests that no route here supports."""

from __future__ import annotations

from deployments.http.validation import ForeignFields

FOREIGN_FIELDS = ForeignFields(
    unused={"metadata": "the server does not store it"},
    ignored={
        "ec_transfer_params": "the server chooses the encode pool",
        "guided_decoding_backend": "there is only one backend",
        "guided_whitespace_pattern": "between tokens of JSON the server allows one space, or a "
        "line break and up to 20 blanks",
        "kv_transfer_params": "the server decides where a prompt is computed",
        "length_penalty": "it applies to beam search only, which is not supported",
        "media_io_kwargs": "the settings in the model's folder determine how images are processed",
        "mm_processor_kwargs": "the settings in the model's folder determine how images are processed",
        "moderation": "the server does not moderate",
        "prediction": "only chat requests may have a prediction",
        "repetition_detection": "the server does not stop repetitions; use `max_tokens` or penalties",
        "return_mm_kwargs": "responses contain only text",
        "return_prompt_text": "use /tokenize to see the prompt of a chat",
        "return_token_offsets": "vLLM ignores it for this request too",
        "routed_experts_prompt_start": "the server does not report routed experts",
        "spaces_between_special_tokens": "tokens are joined without extra spaces",
        "store": "the server does not store it",
        "stream_interval": "every token is sent when it is generated",
        "thinking_token_budget": "only chat requests can limit reasoning",
        "verbosity": "it is not passed to the model",
        "vllm_xargs": "they are arguments for plugins of vLLM",
        "watermarking": "the server adds no watermark",
        "web_search_options": "the server does not search the web",
    },
    refused={
        "audio": "answers are always text",
        "chat_template": "a template is code, and the server runs no code from requests; it uses "
        "the template of its configuration",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "logprob_token_ids": "only the most likely tokens can be reported",
        "logits_processors": "the server runs no code from requests",
        "modalities": "answers are always text",
        "prompt_embeds": "prompts are text or token ids",
        "suffix": "the model can only continue a text at its end",
        "use_beam_search": "beam search is not supported",
    },
    neutral={
        "function_call": ["none", "auto"],
        "functions": [[]],
        "modalities": [["text"]],
        "length_penalty": [1, 1.0],
        "return_mm_kwargs": [True],
        "routed_experts_prompt_start": [0],
        "spaces_between_special_tokens": [True],
        "suffix": [""],
        "verbosity": ["medium"],
    },
)
