"""LangChain over Anthropic's route: chat, streams, tools."""

import os
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


chat = ChatAnthropic(
    base_url=os.environ["URL"],
    api_key=os.environ["KEY"],
    model=os.environ["MODEL"],
    max_tokens=100,
    temperature=0.5,
    max_retries=0,
)
answer = chat.invoke([("system", "Be short."), ("user", "def add(a, b):")])
assert answer.text and answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.text for chunk in chat.stream("def add(a, b):"))
called = chat.bind_tools([weather], tool_choice="weather").invoke("Rome?")
assert called.tool_calls[0]["name"] == "weather" and called.tool_calls[0]["args"]["city"] in ("Oslo", "Rome")
print("langchain-anthropic")
