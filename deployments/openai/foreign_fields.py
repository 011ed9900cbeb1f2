"""Fields of OpenAI's and vLLM's requests that no route here supports."""

from __future__ import annotations

from deployments.http.validation import ForeignFields

FOREIGN_FIELDS = ForeignFields(
    unused={"metadata": "nothing is stored"},
    ignored={
        "ec_transfer_params": "encode pools are chosen by the server",
        "guided_decoding_backend": "there is one",
        "guided_whitespace_pattern": "between tokens of JSON there is at most a space, or a line break and 20 blanks",
        "kv_transfer_params": "the server decides where a prompt is computed",
        "length_penalty": "it is for beam search",
        "media_io_kwargs": "images are resized as the model's folder says",
        "mm_processor_kwargs": "images are resized as the model's folder says",
        "moderation": "nothing is moderated",
        "prediction": "only chats have one",
        "repetition_detection": "an answer ends at its end or at `max_tokens`",
        "return_mm_kwargs": "responses are text",
        "return_prompt_text": "/tokenize shows the prompt of a chat",
        "return_token_offsets": "vLLM ignores it here too",
        "routed_experts_prompt_start": "routed experts are not reported",
        "spaces_between_special_tokens": "tokens are joined as they are",
        "store": "nothing is stored",
        "stream_interval": "tokens are sent as they come",
        "thinking_token_budget": "only chats know where reasoning ends",
        "verbosity": "the model is not told",
        "vllm_xargs": "they are for plugins of vLLM's",
        "watermarking": "answers have no watermark",
        "web_search_options": "nothing is searched",
    },
    refused={
        "audio": "answers are text",
        "chat_template": "a template is code, and no code of a request is run; the server has its own",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "logprob_token_ids": "log-probabilities are of the most likely tokens",
        "logits_processors": "no code of a request is run",
        "modalities": "answers are text",
        "prompt_embeds": "prompts are text or token ids",
        "suffix": "text is only added at the end",
        "use_beam_search": "answers are sampled",
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
