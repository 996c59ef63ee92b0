"""LlamaIndex over OpenAI's routes: chat, streams, completions."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

given = {"api_base": os.environ["URL"] + "/v1", "api_key": os.environ["KEY"], "model": os.environ["MODEL"]}
chat = OpenAILike(**given, is_chat_model=True, max_tokens=16, max_retries=0)
message = ChatMessage(role="user", content="def add(a, b):")
assert chat.chat([message]).message.content
assert [part.delta for part in chat.stream_chat([message])]
assert OpenAILike(**given, is_chat_model=False, max_tokens=16, max_retries=0).complete("def add(a, b):").text
print("llama-index")
