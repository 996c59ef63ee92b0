"""Measures the adapter `tools` on held-out conversations: whether its message is the right one.

Unlike the exact match of `adapters`, it parses what is generated as a client's message: each call's function and all
arguments must be equal, and where no call is right, the text.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lorikeet.demo.data.tasks import tools
from lorikeet.demo.data.tasks.example import Example, held_out_examples
from lorikeet.demo.evaluation import score
from lorikeet.demo.training import lora
from lorikeet.demo.training.commands import add_device_argument
from lorikeet.demo.training.model import BASE_FOLDER

NUM_EXAMPLES = 1200
"""Almost half of them need calls."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, default=BASE_FOLDER)
    parser.add_argument("--adapter", type=Path, default=lora.ADAPTERS_FOLDER / "tools")
    parser.add_argument("--examples", type=int, default=NUM_EXAMPLES, help="held-out conversations")
    add_device_argument(parser)
    parser.add_argument("--show", type=int, default=0, help="print this many wrong answers")


def run(options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.adapter)
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).to(options.device).eval()
    examples = held_out_examples(tools, options.examples)
    written = score.write(lora.load(base, options.adapter), tokenizer, examples, to_the_end=True)
    right = {
        id(output.example): output.ended and is_right(output.example, output.text, tokenizer) for output in written
    }
    for output in [output for output in written if not right[id(output.example)]][: options.show]:
        print(f"--- prompt\n{output.example.prompt}\n--- wanted\n{output.example.answer}\n--- written\n{output.text}")
    kinds = {kind_of(example): 0 for example in examples}
    results = {
        kind: _share([right[id(example)] for example in examples if kind_of(example) == kind]) for kind in sorted(kinds)
    }
    print(json.dumps(results))


def is_right(example: Example, text: str, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Text that cannot be parsed, such as a call whose JSON is not valid, is wrong."""
    try:
        message = tokenizer.parse_response(text, prefix=example.prompt)
    except ValueError:
        return False
    return _content(message) == _content(tokenizer.parse_response(example.answer, prefix=example.prompt))


def kind_of(example: Example) -> str:
    """By what the right answer is."""
    if num_calls := example.answer.count("<tool_call>"):
        return "one call" if num_calls == 1 else "two calls"
    return "after results" if example.prompt.endswith("</tool_response><|end|><|assistant|>") else "no call"


def _content(message: Mapping[str, Any]) -> tuple[str, list[Any]]:
    return message.get("content", ""), [call["function"] for call in message.get("tool_calls", [])]


def _share(right: Sequence[bool]) -> dict[str, float]:
    return {"examples": len(right), "right": round(sum(right) / len(right), 4)}
