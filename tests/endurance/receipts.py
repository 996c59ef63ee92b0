"""Receipts of a mixed, loaded run, all replayed: on two replicas under load, and on a server with other speculation.

Base and three adapters, no speculation, lookup, draft model and heads, greedy and sampled with and without a seed,
LoRAX's routes and OpenAI's, streams and whole answers. Computed in float32.
"""

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.evidence.figure import Case
from benchmarks.load import servers
from lorikeet.launcher.cli.client import Client
from lorikeet.launcher.cli.replay import SavedReceipt, replay, sentences
from tests.endurance.faults import Load, kinds

CASES = 10
RECEIPTS = 100
"""Receipts of a case."""
CLIENTS = 8
"""That ask and replay at once, in addition to those of the load."""
NUM_TOKENS = (16, 96)
SEED = 4242
EXACT = ("--dtype", "float32", "--cpu-memory", "512MiB")
FIRST = (
    *EXACT, "--replicas", "2", "--threads", "1", "--draft-model-id", "demo/draft", "--speculative-tokens", "4",
)  # fmt: skip
SECOND = (*EXACT, "--speculative-method", "lookup", "--speculative-tokens", "9", "--speculative-schedule", "constant")
ROUTES = ("/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions")
METHODS = ("off", "lookup", "draft", "medusa")
ADAPTERS = (None, "json", "sql", "cite")
PROMPTS = (
    "def add(a, b):\n",
    'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n',
    "class A:\n    def __init__(self):\n",
    "import os\n\nfor name in os.listdir():\n",
)


def wanted(draw: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """Route and fields of one request; methods, adapters and routes take turns."""
    method, adapter = METHODS[number % 4], ADAPTERS[number // 4 % 4]
    fields: dict[str, Any] = {"speculative_method": method, "receipt": True}
    if method != "off":
        fields["speculative_schedule"] = draw.choice(("constant", "auto"))
    if method == "medusa":
        fields["heads_id"] = "heads"
    distribution = draw.choice(("greedy", "seeded", "sampled", "penalised"))
    if distribution == "greedy":
        fields["temperature"] = 0.0
    else:
        fields |= {"temperature": draw.uniform(0.5, 1.2), "top_p": draw.uniform(0.8, 0.99)}
    if distribution in ("seeded", "penalised"):
        fields["seed"] = draw.getrandbits(53)
    if distribution == "penalised":
        fields |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4}
    if draw.random() < 0.2:
        fields["stop"] = ["\n\n"]
    fields["ignore_eos_token"] = draw.random() < 0.5
    route, prompt = draw.choice(ROUTES), draw.choice(PROMPTS) * draw.randint(1, 3)
    length = draw.randint(*NUM_TOKENS)
    if not route.startswith("/v1"):
        if adapter is not None:
            fields["adapter_id"] = adapter
        return route, {"inputs": prompt, "parameters": {**fields, "max_new_tokens": length, "details": True}}
    body = {**fields, "model": adapter or "__base_model__", "max_tokens": length}
    if route.endswith("chat/completions"):
        return route, {**body, "messages": [{"role": "user", "content": prompt}]}
    return route, {**body, "prompt": prompt}


def asked(client: Client, route: str, body: dict[str, Any]) -> SavedReceipt:
    """The receipt of one answer, whole or streamed."""
    if route == "/generate_stream":
        with client.stream(body["inputs"], **body["parameters"]) as stream:
            ids = [token.id for token in stream]
        receipt = SavedReceipt.read(stream.details["receipt"])
        if receipt.output_ids != ids:
            raise ValueError("a stream's receipt is not of its tokens")
        return receipt
    answer = client.post(route, body)
    return SavedReceipt.read(answer.get("details", answer)["receipt"])


def differences(client: Client, receipts: Sequence[SavedReceipt]) -> list[str]:
    """The report of each receipt whose replay has other tokens."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        outcomes = list(pool.map(lambda receipt: replay(client, receipt), receipts))
    pairs = zip(receipts, outcomes, strict=True)
    return ["; ".join(sentences(receipt, outcome)) for receipt, outcome in pairs if not outcome.is_identical]


def case(number: int, num_receipts: int) -> Case:
    """One run: receipts under load, replayed under load, and on the other server."""
    draw = random.Random(SEED + number)
    requests = [wanted(draw, index) for index in range(num_receipts)]
    with servers.running("receipts", servers.lorikeet(None, *FIRST)) as first:
        client = Client(f"http://127.0.0.1:{first.port}")
        with Load(client, kinds()).running(SEED + number), ThreadPoolExecutor(CLIENTS) as pool:
            receipts = list(pool.map(lambda each: asked(client, *each), requests))
            on_replicas = differences(client, receipts)
    with servers.running("receipts-second", servers.lorikeet(None, *SECOND)) as second:
        elsewhere = differences(Client(f"http://127.0.0.1:{second.port}"), receipts)
    raw = {
        "receipts": len(receipts),
        "tokens": sum(receipt.num_tokens for receipt in receipts),
        "texts": len({receipt.values["output"]["sha256"] for receipt in receipts}),
        "methods": dict(Counter(receipt.values["speculation"]["method"] for receipt in receipts)),
        "different_on_replicas": on_replicas,
        "different_elsewhere": elsewhere,
    }
    return Case(f"receipts {number}", raw)
