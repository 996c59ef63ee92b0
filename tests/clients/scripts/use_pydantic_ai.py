"""Pydantic AI over OpenAI's and Anthropic's routes: texts, streams and objects."""

import asyncio
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    city: Literal["Rome", "Paris"]


async def main() -> None:
    url, key, name = os.environ["URL"], os.environ["KEY"], os.environ["MODEL"]
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    chat = OpenAIChatModel(name, provider=provider)
    anthropic = AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key=key))
    settings = {"max_tokens": 200}
    for model in (chat, OpenAIResponsesModel(name, provider=provider), anthropic):
        agent = Agent(model, model_settings=settings)
        assert (await agent.run("def add(a, b):")).output
        async with agent.run_stream("def add(a, b):") as stream:
            assert await stream.get_output()
    found = await Agent(chat, output_type=NativeOutput(Answer), model_settings=settings).run("Rome")
    assert isinstance(found.output, Answer)
    found = await Agent(chat, output_type=Answer, model_settings=settings).run("Rome")
    assert isinstance(found.output, Answer)
    print("pydantic-ai")


asyncio.run(main())
