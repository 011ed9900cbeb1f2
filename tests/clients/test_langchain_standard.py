"""langchain's own tests of chat models and of embeddings (`langchain-tests`), over this server.

Their prompts, which ask for the judgement of a large model (which tool, which arguments, a joke), have their answers in
answers.py; no test is left out for want of judgement. These are skipped, by properties of the class:

- images, audio and PDF files, in messages and in results of tools: the model of this server reads text, and most of
  these tests fetch their files from the network;
- `test_stream_time`: it measures the replay of recorded answers, not a server.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # ChatOpenAI keeps one client of httpx for all its objects
    pytest.mark.filterwarnings("ignore:.*is marked with '@pytest.mark.asyncio'"),
]


class OverServer:
    """Models of this server."""

    @pytest.fixture(autouse=True)
    def _address(self, server: str) -> None:
        self.address = server

    @property
    def params(self) -> dict[str, Any]:
        return {"model": "obedient", "base_url": f"{self.address}/v1", "api_key": "none", "max_retries": 0}


class Standard(OverServer, ChatModelIntegrationTests):
    responses_api = False

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.params, "stream_usage": True, "use_responses_api": self.responses_api}

    @property
    def model_override_value(self) -> str:
        return "also-obedient"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[str]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = self.chat_model_class(**self.chat_model_params)
        if not stream:
            return chat.invoke("Hello")
        chunks = list(chat.stream("Hello"))
        return sum(chunks[1:], start=chunks[0])


class TestChat(Standard):
    pass


class TestResponses(Standard):
    responses_api = True


class TestEmbeddings(OverServer, EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        # else texts are cut by tiktoken, which fetches its files
        return {**self.params, "check_embedding_ctx_length": False}
