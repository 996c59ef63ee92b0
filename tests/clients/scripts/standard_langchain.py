"""LangChain's standard integration tests, unmodified, over OpenAI's and Anthropic's routes and over embeddings.

Tests of what a model can do run against `SCRIPTED_URL`, the others against `URL`.
"""

import os
from typing import Any, ClassVar

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

SKILL = frozenset(
    {
        "test_agent_loop",
        "test_bind_runnables_as_tools",
        "test_json_mode",
        "test_structured_few_shot_examples",
        "test_structured_output",
        "test_structured_output_async",
        "test_structured_output_optional_param",
        "test_structured_output_pydantic_2_v1",
        "test_tool_calling",
        "test_tool_calling_async",
        "test_tool_calling_with_no_arguments",
        "test_tool_choice",
        "test_unicode_tool_call_integration",
    }
)
"""Tests whose model has to call the right tool with the right arguments, or to complete an object."""


class Served(ChatModelIntegrationTests):
    """Either server."""

    __test__ = False
    path = "/v1"
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def server(self, request: pytest.FixtureRequest) -> None:
        is_scripted = request.node.originalname in SKILL
        self.url = os.environ["SCRIPTED_URL" if is_scripted else "URL"]
        self.max_tokens = 600 if is_scripted else 32  # the scripted model has about one token per byte

    @property
    def chat_model_params(self) -> dict[str, Any]:
        where = {"base_url": f"{self.url}{self.path}", "api_key": os.environ["KEY"], "model": os.environ["MODEL"]}
        return {**where, "max_tokens": self.max_tokens, "max_retries": 0, "timeout": 60, **self.settings}

    @property
    def model_override_value(self) -> str:
        return os.environ["SECOND_MODEL"]


class ServedToOpenAI(Served):
    """A route of OpenAI's."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatCompletions(ServedToOpenAI):
    """`/v1/chat/completions`."""

    __test__ = True
    settings: ClassVar = {"temperature": 0, "stream_usage": True}


class TestResponses(ServedToOpenAI):
    """`/v1/responses`."""

    __test__ = True
    settings: ClassVar = {"temperature": 0, "use_responses_api": True}


class TestMessages(Served):
    """`/v1/messages`."""

    __test__ = True
    path = ""

    @property
    def chat_model_class(self) -> type[ChatAnthropic]:
        return ChatAnthropic

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True


class TestEmbeddings(EmbeddingsIntegrationTests):
    """`/v1/embeddings`."""

    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        where = {"base_url": f"{os.environ['EMBEDDER_URL']}/v1", "api_key": os.environ["KEY"], "model": "embedder"}
        return {**where, "check_embedding_ctx_length": False}  # else it sends token ids of OpenAI's own tokenizer
