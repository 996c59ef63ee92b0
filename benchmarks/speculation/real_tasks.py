"""What speculation saves on real texts: four tasks in a conversation with a real model, each prompt with every way of
drafting in turn, one client.

    python -m benchmarks.speculation.real_tasks MODEL

MODEL is a folder or a `.gguf` file. The answers must be the same in every way; seconds are from the request to its last
token.
"""

import heapq
import inspect
import json
import shlex
import statistics
import textwrap
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.evidence import arguments
from benchmarks.load import servers

PROSE = Path(__file__).parents[2] / "tests" / "real" / "prose.txt"
MAX_TOKENS = 96
PROMPTS = 6
"""Of each task and round."""
ROUNDS = 2
LIMIT_S = 110.0
"""Of each task: no prompt begins later, so that all tasks take eight minutes at most."""
DRAFTED = 8
OFF = "off"
WAYS: Mapping[str, Mapping[str, Any]] = {
    OFF: {"speculative_method": "off"},
    "lookup": {"speculative_method": "lookup", "speculative_tokens": DRAFTED},
    "auto": {"speculative_method": "auto", "speculative_tokens": DRAFTED},
}
FUNCTIONS: Sequence[Callable[..., Any]] = (
    shlex.join, shlex.quote, textwrap.shorten, textwrap.indent, heapq.nsmallest, textwrap.dedent,
)  # fmt: skip
QUESTIONS = (
    "What should I see in Lisbon in two days?",
    "Why is the sky blue?",
    "How do I remove a coffee stain from a white shirt?",
    "Explain to a child what a volcano is.",
    "What is the difference between a virus and a bacterium?",
    "Give me three ideas for a quick dinner with eggs.",
)


class Answer(NamedTuple):
    """What one request gave."""

    text: str
    seconds: float
    num_tokens: int
    num_steps: int


def summaries() -> list[str]:
    """Passages to be quoted from."""
    words = PROSE.read_text().split()
    passages = [" ".join(words[start : start + 160]) for start in range(0, 160 * PROMPTS, 160)]
    return [f"Summarise this text with its most important sentences, word for word:\n\n{part}" for part in passages]


def edits() -> list[str]:
    """Functions of the standard library to be changed a little."""
    order = "Rename the first parameter to `value`. Answer with the whole function and nothing else."
    return [f"{order}\n\n```python\n{inspect.getsource(function)[:900]}\n```" for function in FUNCTIONS]


def documents() -> list[str]:
    """Invoices to be written as JSON."""
    draw, prompts = Random(0), []
    names = ["Nora Schmidt", "Amir Haddad", "Lucía Ortega", "Tom Becker", "Mei Tanaka", "Ada Novak"]
    items = ["oak shelf", "desk lamp", "blue armchair", "glass vase", "linen curtain", "brass hook"]
    for name in names:
        lines = [f"{draw.randint(1, 9)} x {item} at {draw.randint(5, 90)}.50 EUR" for item in draw.sample(items, 3)]
        head = f"Invoice {draw.randint(10000, 99999)} for {name}, 12 Mill Lane, Ghent, 4 March 2026."
        document = f"{head}\n" + "\n".join(lines)
        prompts.append(f"Write this invoice as JSON with number, customer, address, date and items:\n\n{document}")
    return prompts


TASKS: Mapping[str, Callable[[], list[str]]] = {
    "summaries that quote": summaries,
    "edits of code": edits,
    "JSON from documents": documents,
    "chat": lambda: list(QUESTIONS),
}


def ask(port: int, prompt: str, way: str) -> Answer:
    """One greedy answer."""
    body = {"model": "", "messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({**body, **WAYS[way]}).encode(),
        {"content-type": "application/json"},
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        answer, skipped = json.load(response), int(response.headers.get("x-skipped-tokens") or 0)
    seconds = time.perf_counter() - start
    num_tokens = answer["usage"]["completion_tokens"]
    return Answer(answer["choices"][0]["message"]["content"], seconds, num_tokens, num_tokens - skipped)


def measure(port: int, rounds: int) -> None:
    """Print the rows of all tasks. Raises ValueError where a way changes an answer."""
    print("| task | way | answers | tokens per step | seconds, all answers | off over it |\n" + 6 * "|---" + "|")
    for task, make in TASKS.items():
        prompts = make()[:PROMPTS]
        answers: dict[str, list[Answer]] = {way: [] for way in WAYS}
        until = time.monotonic() + LIMIT_S
        for number in range(rounds):
            for index, prompt in enumerate(prompts):
                if time.monotonic() > until:
                    break
                ways = list(WAYS)
                first = (number + index) % len(ways)
                texts = set()
                for way in [*ways[first:], *ways[:first]]:
                    answer = ask(port, prompt, way)
                    texts.add(answer.text)
                    answers[way].append(answer)
                if len(texts) > 1:
                    raise ValueError(f"{task}: ways of drafting gave {len(texts)} different answers to {prompt[:60]!r}")
        seconds = {way: sum(answer.seconds for answer in given) for way, given in answers.items()}
        for way, given in answers.items():
            per_step = statistics.mean(answer.num_tokens / answer.num_steps for answer in given)
            print(
                f"| {task} | {way} | {len(given)} | {per_step:.2f} | {seconds[way]:.1f} "
                f"| {seconds[OFF] / seconds[way]:.2f} |",
                flush=True,
            )


def main() -> None:
    """Serve the model and measure."""
    parser = arguments.parser(__doc__, rounds=ROUNDS)
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    with servers.running(
        "real-tasks", servers.lorikeet(options.model.resolve(), "--max-total-tokens", "2048")
    ) as server:
        ask(server.port, QUESTIONS[0], "auto")
        measure(server.port, options.rounds)


if __name__ == "__main__":
    main()
