"""Lorikeet next to llama.cpp's server on the same `.gguf` files, over HTTP, in alternating rounds.

    python -m benchmarks.serving.real_files FILE… [--llama-server PROGRAM] [--rounds N]

For each number of clients a closed loop of 128 tokens in and 64 out; then the time to the first token of longer
prompts, one client. The limit is what reading the matrices of the file once per token allows.
"""

import argparse
import contextlib
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from benchmarks.evidence import arguments
from benchmarks.load import completions, servers
from benchmarks.load.completions import Endpoint, RequestLength, TimedCompletion
from benchmarks.load.rounds import EXTRA, OURS, alone, in_turn
from benchmarks.serving.llama_cpp import IGNORE_EOS, LLAMA_CPP, program
from benchmarks.serving.machine import REPEATS, best_read

CLIENTS = (1, 8, 32)
REQUESTS_PER_CLIENT = {1: 3, 8: 2, 32: 1}
NUM_PROMPT, NUM_OUTPUT = 128, 64
FIRST_TOKENS = (128, 512, 2048)
"""Lengths of prompts whose first token is timed."""
ROUNDS = 3
SEED = 55_000
TEXT = "the of and to in is that for was with as his they be at one have this from had not but what all were we when"
WORDS = TEXT.split()
"""Each is a token after a space, in the vocabularies of SmolLM2 and Gemma."""
Answers = Sequence[TimedCompletion]


class WordLength(RequestLength):
    """Tokenizers may add a token that begins the text."""

    def check(self, answer: TimedCompletion) -> None:
        """An answer with another number of tokens has an error."""
        numbers = (answer.num_prompt, answer.num_output)
        if not answer.error and numbers not in ((self.num_prompt + added, self.num_output) for added in (0, 1)):
            answer.error = f"{answer.num_prompt} tokens in, {answer.num_output} out"


def texts(count: int, length: int, seed: int) -> list[str]:
    """`count` texts of `length` random words, that is tokens."""
    draw = Random(seed)
    return [" ".join(draw.choices(WORDS, k=length)) for _ in range(count)]


def llama_server(file: Path, server: Path, clients: int, slot_tokens: int) -> servers.Command:
    """llama.cpp's server with a slot for each client and a thread for each core; all else is its default."""
    slots = ("--parallel", str(clients), "--ctx-size", str(clients * slot_tokens), "--threads", str(os.cpu_count()))
    address = ("--host", "127.0.0.1", "--port", "{port}", "--no-webui")
    return servers.Command((str(server), "--model", str(file), *slots, *address))


@dataclass(frozen=True)
class Load:
    """Requests of a round."""

    clients: int
    requests: int
    """Of each client."""
    num_prompt: int
    num_output: int


@contextlib.contextmanager
def pair(file: Path, server: Path, clients: int, slot_tokens: int) -> Iterator[Mapping[str, servers.RunningServer]]:
    """Both servers of a file."""
    commands = {OURS: servers.lorikeet(file), LLAMA_CPP: llama_server(file, server, clients, slot_tokens)}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(servers.running(name, command)) for name, command in commands.items()}


def ask(running: Mapping[str, servers.RunningServer], model: str, load: Load, seed: int, name: str) -> Answers:
    """A closed loop on one server. Raises RuntimeError for an answer that failed."""
    target = Endpoint(running[name].port, model, EXTRA[OURS] if name == OURS else IGNORE_EOS)
    length = WordLength(load.num_prompt, load.num_output)
    prompts = texts(load.clients * load.requests, load.num_prompt, seed)
    answers = uvloop.run(completions.closed_loop(target, prompts, load.clients, length))
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"{name}: {errors[0]}")
    return answers


def alternate(running: Mapping[str, servers.RunningServer], model: str, load: Load, rounds: int) -> dict[str, Any]:
    """The answers of each server in all rounds, after one request that warms up."""
    answers: dict[str, list[Answers]] = {name: [] for name in running}
    errors: list[str] = []
    for number in range(rounds + 1):
        asked = load if number else replace(load, clients=1, requests=1)
        for name in in_turn(tuple(running), number):
            with alone(name, running, errors):
                seen = ask(running, model, asked, SEED + 1000 * load.num_prompt + number, name)
            if number:
                answers[name].append(seen)
    if errors:
        print("disturbed:", "; ".join(errors), flush=True)
    return answers


def medians(rounds: Sequence[Answers]) -> tuple[float, float, float]:
    """Tokens per second, seconds between tokens and seconds to the first token, of the median round."""
    values = [
        (
            completions.tokens_per_second(answers),
            statistics.median(answer.inter_token_s for answer in answers),
            statistics.median(answer.first_token_s for answer in answers),
        )
        for answers in rounds
    ]
    throughput, between, first = (statistics.median(column) for column in zip(*values, strict=True))
    return throughput, between, first


def matrix_bytes(file: Path) -> int:
    """Bytes of the matrices that each token is multiplied by; a tied embedding is the output head."""
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) == 2}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    return sum(int(tensor.n_bytes) for tensor in tensors.values())


def compare(file: Path, options: argparse.Namespace, bytes_per_s: float) -> None:
    """Print the rows of one file."""
    model = str(file)
    limit = bytes_per_s / matrix_bytes(file)
    print(f"\n{file.name}: reading its matrices allows {limit:.0f} tokens/s at one client\n")
    print("| work | lorikeet | llama.cpp | ratio | between tokens, ms | ratio |\n|---|---|---|---|---|---|", flush=True)
    for clients in options.clients:
        load = Load(clients, REQUESTS_PER_CLIENT[clients], NUM_PROMPT, NUM_OUTPUT)
        with pair(file, options.llama_server, clients, 2 * (NUM_PROMPT + NUM_OUTPUT)) as running:
            answers = alternate(running, model, load, options.rounds)
        (ours, own_gap, _), (theirs, gap, _) = medians(answers[OURS]), medians(answers[LLAMA_CPP])
        gaps = f"{1000 * own_gap:.1f} / {1000 * gap:.1f} | {own_gap / gap:.2f}"
        print(f"| {clients} clients, tokens/s | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} | {gaps} |", flush=True)
    if not options.first_tokens:
        return
    with pair(file, options.llama_server, 1, max(options.first_tokens) + 64) as running:
        for length in options.first_tokens:
            load = Load(1, 1, length, 2)
            answers = alternate(running, model, load, options.rounds)
            own, other = medians(answers[OURS])[2], medians(answers[LLAMA_CPP])[2]
            print(f"| first of {length} tokens, s | {own:.3f} | {other:.3f} | {own / other:.2f} | | |", flush=True)


def numbers(text: str) -> tuple[int, ...]:
    """Of a list with commas."""
    return tuple(map(int, filter(None, text.split(","))))


def main() -> None:
    """Compare on each file."""
    parser = arguments.parser(__doc__, rounds=ROUNDS)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--llama-server", type=Path, help="the program, by default the one that llama_cpp.py builds")
    parser.add_argument("--clients", type=numbers, default=CLIENTS, help="numbers of clients, with commas between them")
    parser.add_argument("--first-tokens", type=numbers, default=FIRST_TOKENS, help="lengths of prompts, likewise")
    options = parser.parse_args()
    options.llama_server = options.llama_server or program()
    bytes_per_s = best_read(REPEATS)
    for file in options.files:
        compare(file.resolve(), options, bytes_per_s)


if __name__ == "__main__":
    main()
