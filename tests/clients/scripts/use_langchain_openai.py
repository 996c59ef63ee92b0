"""LangChain over OpenAI's routes: chat, streams, tools, structured output, responses, completions."""

import os

import langchain_openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


given = {"base_url": os.environ["URL"] + "/v1", "api_key": os.environ["KEY"], "model": os.environ["MODEL"]}
chat = ChatOpenAI(**given, max_tokens=200, seed=1, max_retries=0)
assert chat.invoke("def add(a, b):").content
assert "".join(chunk.content for chunk in chat.stream("def add(a, b):"))
called = chat.bind_tools([weather], tool_choice="weather").invoke("Rome?")
assert called.tool_calls[0]["name"] == "weather" and isinstance(called.tool_calls[0]["args"]["city"], str)
assert isinstance(chat.with_structured_output(City, method="json_schema").invoke("Rome"), City)
over_responses = ChatOpenAI(**given, max_tokens=64, max_retries=0, use_responses_api=True)
assert over_responses.invoke("def add(a, b):").text
assert "".join(chunk.text for chunk in over_responses.stream("def add(a, b):"))
assert OpenAI(**given, max_tokens=8, max_retries=0).invoke("def add(a, b):")
print("langchain-openai")
assert langchain_openai
