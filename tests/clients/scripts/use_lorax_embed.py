"""LoRAX's client with an embedding model: vectors, and the errors of routes for classification."""

import asyncio
import os

from lorax import AsyncClient, Client
from lorax.errors import UnprocessableEntityError

given = {"headers": {"Authorization": f"Bearer {os.environ['KEY']}"}, "timeout": 120}
client = Client(os.environ["URL"], **given)
vector = client.embed("the quick brown fox").embeddings
assert len(vector) == 64 and abs(sum(value * value for value in vector) - 1) < 1e-5
assert asyncio.run(AsyncClient(os.environ["URL"], **given).embed("the quick brown fox")).embeddings == vector
try:
    client.classify_batch(["a text"])
except UnprocessableEntityError as error:
    assert "/v1/embeddings" in str(error)
else:
    raise AssertionError("it must be rejected")
print("lorax-client: embed")
