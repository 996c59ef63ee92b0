"""Text Generation Inference's client: whole answers, streams, errors."""

import os

from text_generation import Client
from text_generation.errors import ValidationError

client = Client(os.environ["URL"], headers={"Authorization": f"Bearer {os.environ['KEY']}"}, timeout=120)
answer = client.generate("def add(a, b):", max_new_tokens=8, seed=1, temperature=0.9, top_n_tokens=2)
assert answer.generated_text and len(answer.details.top_tokens) == answer.details.generated_tokens
parts = [
    each.token.text for each in client.generate_stream("def add(a, b):", max_new_tokens=8, seed=1, temperature=0.9)
]
assert "".join(parts).startswith(answer.generated_text)
try:
    client.generate("x", max_new_tokens=100_000)
except ValidationError:
    print("text-generation")
else:
    raise AssertionError("it must be rejected")
