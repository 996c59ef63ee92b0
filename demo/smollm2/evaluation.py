"""Scores of the demo's adapters and of the model without them, on held-out examples, from a running server.

python -m lorikeet.demo.smollm2.evaluation --url http://127.0.0.1:3000
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from lorikeet.demo.smollm2.tasks import TASKS, Example, examples

BASE = "lorikeet/smollm2"
SCORES = Path(__file__).with_name("scores.json")


def answer(client: httpx.Client, model: str, messages: list[dict[str, str]]) -> str:
    """The greedy text of a model or adapter. Raises httpx.HTTPError."""
    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 80}
    if model != BASE:
        body["adapter_source"] = "local"  # a folder below demo/smollm2/adapters, also one that no alias names
    response = client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    content: str = response.json()["choices"][0]["message"]["content"] or ""
    return content


def scores(client: httpx.Client, task: str, count: int, show: int) -> dict[str, Any]:
    """Mean scores of an adapter and of the model, which gets an instruction instead."""

    def both(example: Example) -> tuple[str, str]:
        return answer(client, task, example.messages), answer(client, BASE, example.base_messages())

    drawn = examples(task, count, held_out=True)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(both, drawn))
    for example, (adapted, bare) in list(zip(drawn, texts, strict=True))[:show]:
        print(json.dumps({"right": example.answer, "adapter": adapted, "base": bare}, indent=1))
    adapter, base = (
        sum(example.score(pair[index]) for example, pair in zip(drawn, texts, strict=True)) / count for index in (0, 1)
    )
    return {"adapter": task, "examples": count, "score": round(adapter, 3), "base": round(base, 3)}


def main() -> None:
    """Run the command line of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:3000", help="the server of the demo")
    parser.add_argument("--examples", type=int, default=24, help="held-out examples of each adapter")
    trained = [task for task in TASKS if (SCORES.parent / "adapters" / task).is_dir()]
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=trained, help="adapters to score")
    parser.add_argument("--show", type=int, default=0, help="print so many answers of each")
    options = parser.parse_args()
    rows = json.loads(SCORES.read_text()) if SCORES.exists() else {}
    with httpx.Client(base_url=options.url, timeout=600.0) as client:
        for task in options.only:
            rows[task] = scores(client, task, options.examples, options.show)
            print(json.dumps(rows[task]), flush=True)
    SCORES.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
