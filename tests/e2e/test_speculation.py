"""Speculative decoding in the whole server: the demo model's tokens are the same with and without it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lorikeet.launcher import Client, launch
from lorikeet.launcher.cli.client import Answer
from tests.e2e.launched import ROOT

PROMPTS = (
    "def add(a, b):\n    return a + b\n\ndef add(a, b, c):\n",
    "class A:\n    def __init__(self, name):\n        self.name = name\n\nclass B:\n    def __init__(self, name):\n",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n",
    "import os\n\n",
)
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"do_sample": True, "seed": 9, "watermark": True, "top_k": 40},
    {"stop": ["\n\n"]},
)


def ask(server: Client, prompt: str, **parameters: Any) -> Answer:
    return server.generate(prompt, **{"max_new_tokens": 48, **parameters})


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    flags = {"speculative_tokens": 5, "speculative_schedule": "constant"}
    with launch(str(ROOT / "demo" / "base"), cpu_memory="64MiB", threads=1, **flags) as client:
        yield client


def test_texts_are_the_same_with_and_without(server: Client) -> None:
    cases = [(prompt, asked) for prompt in PROMPTS for asked in ASKED]
    widths = [{"speculative_tokens": 0}, {}, {"speculative_tokens": 1}, {"speculative_tokens": 10}]
    with ThreadPoolExecutor(8) as pool:  # batched as they arrive
        found = [[pool.submit(ask, server, prompt, **asked, **width) for width in widths] for prompt, asked in cases]
        answers = [[each.result() for each in row] for row in found]
    accepted = 0
    for plain, *drafted in answers:
        assert "speculation" not in plain.details
        for each in drafted:
            assert each.text == plain.text
            assert [token.id for token in each.tokens] == [token.id for token in plain.tokens]
            report = each.details["speculation"]
            num_tokens = each.details["generated_tokens"]
            assert sum(report["sources"].values()) == num_tokens
            assert report["steps"] + each.details["skipped_tokens"] == num_tokens
            assert report["accepted"] <= report["drafted"]
            accepted += report["accepted"]
    assert accepted > 100
