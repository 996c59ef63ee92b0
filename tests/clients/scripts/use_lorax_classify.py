"""LoRAX's client with a model that labels tokens: entities of one text and of several."""

import os

from lorax import Client

client = Client(os.environ["URL"], headers={"Authorization": f"Bearer {os.environ['KEY']}"}, timeout=120)
texts = ["Angela Smith says the fox jumps over Berlin", "word for word, Paris"]
first, second = client.classify_batch(texts)
assert set(first.entities[0]) == {"entity_group", "score", "word", "start", "end"}
assert [client.classify(text).entities for text in texts] == [first.entities, second.entities]
print("lorax-client: classify")
