"""LoRAX's client: whole answers, streams, an adapter, errors."""

import os

from lorax import Client
from lorax.errors import ValidationError

client = Client(os.environ["URL"], headers={"Authorization": f"Bearer {os.environ['KEY']}"}, timeout=120)
prompt = 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n'
answer = client.generate(prompt, max_new_tokens=16, details=True)
assert answer.details.generated_tokens <= 16 and answer.generated_text
parts = [response.token.text for response in client.generate_stream(prompt, max_new_tokens=16)]
assert "".join(parts).startswith(answer.generated_text[:4])
assert client.generate(prompt, max_new_tokens=32, adapter_id="json").generated_text != answer.generated_text
try:
    client.generate(prompt, max_new_tokens=100_000)
except ValidationError:
    print("lorax-client")
else:
    raise AssertionError("it must be rejected")
