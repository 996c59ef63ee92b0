"""Lorikeet next to llama.cpp's server on the same `.gguf` files, over HTTP, in alternating rounds.

    python -m benchmarks.serving.real_files FILE… --llama-server PROGRAM [--rounds N]

For each number of clients a closed loop of 128 tokens in and 64 out; then the time to the first token of longer
prompts, one client; last memory: of llama.cpp's server all, of ours what the file adds to a server of `lorikeet/base`
with as much context. The limit is what reading the matrices of the file once per token allows. Processor times are
those of all processes of a server per token that it generated, or per prompt; with `--threads 1` no thread waits for
another, and they hardly depend on what else the machine does.
"""

import argparse
import contextlib
import json
import os
import statistics
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import uvloop

from benchmarks.evidence import arguments
from benchmarks.load import completions, servers
from benchmarks.load.completions import Endpoint, RequestLength, TimedCompletion
from benchmarks.load.rounds import EXTRA, OURS, alone, in_turn
from benchmarks.serving.machine import REPEATS, best_read

LLAMA_CPP = "llama.cpp"
SMALL = "lorikeet/base"
"""A model whose memory is that of the server itself."""
IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True, "cache_prompt": False}
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


class Round(NamedTuple):
    """What one server did in a round."""

    answers: Sequence[TimedCompletion]
    cpu_s: float


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


def llama_server(file: Path, server: Path, clients: int, slot_tokens: int, threads: int) -> servers.Command:
    """llama.cpp's server with a slot for each client; all else is its default."""
    slots = ("--parallel", str(clients), "--ctx-size", str(clients * slot_tokens), "--threads", str(threads))
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
def pair(
    file: Path, server: Path, clients: int, slot_tokens: int, threads: int
) -> Iterator[Mapping[str, servers.RunningServer]]:
    """Both servers of a file."""
    ours = servers.lorikeet(file, "--threads", str(threads))
    commands = {OURS: ours, LLAMA_CPP: llama_server(file, server, clients, slot_tokens, threads)}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(servers.running(name, command)) for name, command in commands.items()}


def ask(running: Mapping[str, servers.RunningServer], model: str, load: Load, seed: int, name: str) -> Round:
    """A closed loop on one server. Raises RuntimeError for an answer that failed."""
    target = Endpoint(running[name].port, model, EXTRA[OURS] if name == OURS else IGNORE_EOS)
    length = WordLength(load.num_prompt, load.num_output)
    prompts = texts(load.clients * load.requests, load.num_prompt, seed)
    earlier_s = running[name].cpu_seconds()
    answers = uvloop.run(completions.closed_loop(target, prompts, load.clients, length))
    spent_s = running[name].cpu_seconds() - earlier_s
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"{name}: {errors[0]}")
    return Round(answers, spent_s)


def alternate(
    running: Mapping[str, servers.RunningServer], model: str, load: Load, rounds: int
) -> dict[str, list[Round]]:
    """The rounds of each server, after one request that warms up."""
    done: dict[str, list[Round]] = {name: [] for name in running}
    errors: list[str] = []
    for number in range(rounds + 1):
        asked = load if number else replace(load, clients=1, requests=1)
        for name in in_turn(tuple(running), number):
            with alone(name, running, errors):
                seen = ask(running, model, asked, SEED + 1000 * load.num_prompt + number, name)
            if number:
                done[name].append(seen)
    if errors:
        print("disturbed:", "; ".join(errors), flush=True)
    return done


class Speeds(NamedTuple):
    """Of the median round; times in seconds."""

    tokens_per_second: float
    between: float
    """Tokens."""
    first: float
    """Token."""
    cpu_of_token: float
    cpu_of_prompt: float


def medians(rounds: Sequence[Round]) -> Speeds:
    values = [
        Speeds(
            completions.tokens_per_second(answers),
            statistics.median(answer.inter_token_s for answer in answers),
            statistics.median(answer.first_token_s for answer in answers),
            cpu_s / sum(answer.num_output for answer in answers),
            cpu_s / len(answers),
        )
        for answers, cpu_s in rounds
    ]
    return Speeds(*(statistics.median(column) for column in zip(*values, strict=True)))


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
    print("| work | lorikeet | llama.cpp | ratio | processor time, lorikeet | llama.cpp | ratio |\n" + 7 * "|---" + "|")
    for clients in options.clients:
        load = Load(clients, REQUESTS_PER_CLIENT[clients], NUM_PROMPT, NUM_OUTPUT)
        with pair(file, options.llama_server, clients, 2 * (NUM_PROMPT + NUM_OUTPUT), options.threads) as running:
            done = alternate(running, model, load, options.rounds)
        ours, theirs = medians(done[OURS]), medians(done[LLAMA_CPP])
        tokens = (ours.tokens_per_second, theirs.tokens_per_second)
        row(f"{clients} clients: tokens/s", tokens, (1000 * ours.cpu_of_token, 1000 * theirs.cpu_of_token))
        row(f"{clients} clients: ms between tokens", (1000 * ours.between, 1000 * theirs.between))
    if options.first_tokens:
        first_tokens(file, options)
    compare_memory(file, options)


def first_tokens(file: Path, options: argparse.Namespace) -> None:
    """Print the rows of prompts."""
    model = str(file)
    with pair(file, options.llama_server, 1, max(options.first_tokens) + 64, options.threads) as running:
        for length in options.first_tokens:
            done = alternate(running, model, Load(1, 1, length, 2), options.rounds)
            ours, theirs = medians(done[OURS]), medians(done[LLAMA_CPP])
            cpu = (1000 * ours.cpu_of_prompt, 1000 * theirs.cpu_of_prompt)
            row(f"{length} tokens: ms to the first token", (1000 * ours.first, 1000 * theirs.first), cpu)


def compare_memory(file: Path, options: argparse.Namespace) -> None:
    """Print the row of the memory of servers that have answered one request, in MiB."""
    slot_tokens, threads = 2 * (NUM_PROMPT + NUM_OUTPUT), options.threads
    context = ("--max-total-tokens", str(slot_tokens), "--max-batch-total-tokens", str(slot_tokens))
    base, ours = (servers.lorikeet(model, *context, "--threads", str(threads)) for model in (SMALL, file))
    adds = memory_of(ours, "Pss") - memory_of(base, "Pss")
    row("MiB of memory", (adds, memory_of(llama_server(file, options.llama_server, 1, slot_tokens, threads), "Rss")))


def memory_of(command: servers.Command, kind: str) -> float:
    """MiB of all processes of a server, of one kind of /proc/PID/smaps_rollup."""
    with servers.running("memory", command) as server:
        body = {"model": "", "prompt": texts(1, NUM_OUTPUT, SEED)[0], "max_tokens": NUM_OUTPUT}
        address = f"http://127.0.0.1:{server.port}/v1/completions"
        asked = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            answer.read()
        rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in servers.group(server.process.pid)]
    lines = (line for rollup in rollups for line in rollup.splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1024


def row(name: str, values: tuple[float, float], cpu_ms: tuple[float, float] | None = None) -> None:
    """Print a row: values of both servers and processor times, each with its ratio."""
    columns = [name]
    for ours, theirs in filter(None, (values, cpu_ms)):
        columns += [f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]
    print("|", " | ".join(columns), "|" if cpu_ms else "| | | |", flush=True)


def numbers(text: str) -> tuple[int, ...]:
    """Of a list with commas."""
    return tuple(map(int, filter(None, text.split(","))))


def main() -> None:
    """Compare on each file."""
    parser = arguments.parser(__doc__, rounds=ROUNDS)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's server")
    parser.add_argument("--clients", type=numbers, default=CLIENTS, help="numbers of clients, with commas between them")
    parser.add_argument("--first-tokens", type=numbers, default=FIRST_TOKENS, help="lengths of prompts, likewise")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server (default: one per core)")
    options = parser.parse_args()
    bytes_per_s = best_read(REPEATS)
    for file in options.files:
        compare(file.resolve(), options, bytes_per_s)


if __name__ == "__main__":
    main()
