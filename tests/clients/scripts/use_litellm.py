"""LiteLLM over OpenAI's and Anthropic's routes."""

import os

import litellm

url, key, model = os.environ["URL"], os.environ["KEY"], os.environ["MODEL"]
messages = [{"role": "user", "content": "def add(a, b):"}]
over_openai = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "messages": messages}
over_vllm = {**over_openai, "model": f"hosted_vllm/{model}"}
over_anthropic = {**over_openai, "model": f"anthropic/{model}", "api_base": url}
for given in (over_openai, over_vllm, over_anthropic):
    answer = litellm.completion(**given, max_tokens=8, num_retries=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 8
    chunks = litellm.completion(**given, max_tokens=8, stream=True, num_retries=0)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
text = {"model": f"text-completion-openai/{model}", "api_base": f"{url}/v1", "api_key": key}
assert litellm.text_completion(**text, prompt="def add(a, b):", max_tokens=8).choices[0].text
print("litellm")
