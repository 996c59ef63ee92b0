"""What drafts give with the demo's model, on held-out prompts, from a running server.

python -m lorikeet.demo.smollm2.drafts --url http://127.0.0.1:3000 --shard PID

Every prompt is asked in each way, one request after another, so that all ways have the same machine. One token that is
not counted comes first: it computes the prompt for all of them. Other programs change how long an answer takes, but
hardly the processor time of the shard's process.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lorikeet.demo.smollm2.evaluation import BASE
from lorikeet.demo.smollm2.prompts import Conversation, chats
from lorikeet.demo.smollm2.tasks import examples

RESULTS = Path(__file__).with_name("drafts.json")
HEADS = "heads"
"""The heads' name in the catalogue."""
WAYS: dict[str, dict[str, Any]] = {
    "off": {"speculative_method": "off"},
    "lookup": {"speculative_method": "lookup", "speculative_tokens": 3, "speculative_schedule": "constant"},
    "heads": {"speculative_method": "medusa", "heads_id": HEADS, "speculative_schedule": "constant"},
    "auto": {"speculative_method": "auto", "heads_id": HEADS, "speculative_tokens": 3},
}
"""Fields of a request."""
ADAPTERS = ("json", "sql", "title", "cite")
MAX_TOKENS = 64


@dataclass
class Totals:
    """All answers of one way."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, usage: dict[str, Any], seconds: float) -> None:
        """One answer. Without drafts a step gives one token."""
        report = (usage.get("completion_tokens_details") or {}).get("speculation")
        self.tokens += usage["completion_tokens"]
        self.steps += report["steps"] if report else usage["completion_tokens"]
        self.drafted += report["drafted"] if report else 0
        self.accepted += report["accepted"] if report else 0
        self.seconds += seconds

    def as_json(self) -> dict[str, float]:
        return {
            "tokens_per_step": round(self.tokens / self.steps, 2),
            "accepted": round(self.accepted / max(1, self.drafted), 2),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
        }


def measure(
    client: httpx.Client, model: str, prompts: list[Conversation], clock: Callable[[], float]
) -> dict[str, Totals]:
    """The answers of each way. Raises ValueError if a text depends on the drafts, and httpx.HTTPError."""
    totals = {way: Totals() for way in WAYS}

    def ask(messages: Conversation, max_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens, **fields}
        response = client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    for messages in prompts:
        ask(messages, 1, WAYS["off"])
        texts = set()
        for way, fields in WAYS.items():
            began = clock()
            answer = ask(messages, MAX_TOKENS, fields)
            totals[way].add(answer["usage"], clock() - began)
            texts.add(answer["choices"][0]["message"]["content"])
        if len(texts) > 1:
            raise ValueError(f"the text depends on the drafts: {texts}")
    return totals


def clock_of(process: int | None) -> Callable[[], float]:
    """Processor seconds of a process, or the time."""
    if process is None:
        return time.monotonic
    stat, tick = Path(f"/proc/{process}/stat"), os.sysconf("SC_CLK_TCK")
    return lambda: sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) / tick


def main() -> None:
    """Run the command line of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:3000", help="the server of the demo")
    parser.add_argument("--prompts", type=int, default=24, help="chats; half as many examples of each adapter")
    parser.add_argument("--shard", type=int, help="the shard's process, whose processor time is measured")
    options = parser.parse_args()
    asked = {BASE: chats(options.prompts, held_out=True)}
    for task in ADAPTERS:
        asked[task] = [example.messages for example in examples(task, options.prompts // 2, held_out=True)]
    rows: dict[str, Any] = {}
    with httpx.Client(base_url=options.url, timeout=600.0) as client:
        for model, prompts in asked.items():
            totals = measure(client, model, prompts, clock_of(options.shard))
            rows[model] = {way: total.as_json() for way, total in totals.items()}
            print(model, json.dumps(rows[model]), flush=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
