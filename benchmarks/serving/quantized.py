"""Rounded weights against plain ones, both by our own code on this machine: steps of one request, and perplexity."""

import contextlib
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from benchmarks.evidence.figure import Case, Cases, Raw, in_rounds
from benchmarks.load import completions, servers
from benchmarks.load.rounds import EXTRA, OURS
from benchmarks.models.random_llama import llama_200m
from benchmarks.serving.closed_loop import in_round, run
from lorikeet.demo.data import corpus
from lorikeet.demo.training.model import BASE_FOLDER
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model

PLAIN, METHODS = "bfloat16", ("int8", "int4")
ROUNDS = 8
STEPS = 30
KV_LEN = 288
PAGES = 40
NUM_FILES, WINDOW = 40, 512


def load(folder: Path, method: str) -> Model:
    """A model in bfloat16, its weights rounded by `method` unless that is PLAIN."""
    quantize = None if method == PLAIN else method
    model = load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype="bfloat16", quantize=quantize))
    model.allocate_kv(PAGES)
    return model


def step_ms(model: Model) -> float:
    """Median of STEPS steps of one request."""
    ids, rows = torch.tensor([7]), torch.tensor([0])
    pages = range(-(-(KV_LEN + 1) // model.page_size))
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        model.inputs.fill([Segment(KV_LEN, 1, pages)], ids, rows)
        model.forward()
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times)[STEPS // 2]


def steps() -> Cases:
    """Rounds of steps, the methods one after the other."""
    models = {method: load(llama_200m(), method) for method in (PLAIN, *METHODS)}
    for number in range(ROUNDS):
        yield Case(f"round {number + 1}", {name: step_ms(model) for name, model in models.items()})


def speedup(method: str, raw: Raw) -> float:
    """Speedup of a step over bfloat16."""
    return float(raw[PLAIN] / raw[method])


def nats(model: Model, token_ids: Sequence[int]) -> float:
    """Negative log likelihood of all tokens but the first, each given the ones before it, in nats."""
    ids = torch.tensor(token_ids)
    model.inputs.fill([Segment(0, len(ids) - 1, range(PAGES))], ids[:-1], torch.arange(len(ids) - 1))
    return float(cross_entropy(model.forward(), ids[1:], reduction="sum"))


def texts() -> list[list[int]]:
    """The first WINDOW tokens of held-out files."""
    tokenizer: Any = AutoTokenizer.from_pretrained(BASE_FOLDER)
    encoded = [
        tokenizer.backend_tokenizer.encode(file.text).ids[:WINDOW] for file in corpus.held_out_files()[:NUM_FILES]
    ]
    return [ids for ids in encoded if len(ids) > 1]


def perplexities() -> Cases:
    """One case: the perplexity of the demo's base under each method."""
    chosen = texts()
    num_tokens = sum(len(ids) - 1 for ids in chosen)
    raw: dict[str, float] = {"tokens": num_tokens}
    for method in (PLAIN, *METHODS):
        model = load(Path(BASE_FOLDER), method)
        raw[method] = math.exp(sum(nats(model, ids) for ids in chosen) / num_tokens)
    yield Case("held-out modules", raw)


def perplexity_ratio(method: str, raw: Raw) -> float:
    """Over bfloat16."""
    return float(raw[method] / raw[PLAIN])


REQUESTS = 4
"""Requests of a round."""
SEED = 31_000


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round, after one that warms up."""
    model = llama_200m()
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(_serving(name, model)) for name in (PLAIN, *METHODS)}
        targets = {name: completions.Endpoint(server.port, str(model), EXTRA[OURS]) for name, server in running.items()}
        ask = partial(run, targets, 1, REQUESTS)
        yield from in_rounds(rounds, lambda number: in_round(number, running, partial(ask, SEED + number)))


def _serving(name: str, model: Path) -> contextlib.AbstractContextManager[servers.RunningServer]:
    flags = () if name == PLAIN else ("--quantize", name)
    return servers.running(f"{OURS}-{name}", servers.lorikeet(model, "--dtype", "bfloat16", *flags))
